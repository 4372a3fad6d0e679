"""Verifier (being written)."""

from __future__ import annotations

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Module


def verify(module: Module) -> tuple[Diagnostic, ...]:
    return ()


def check_module(module: Module) -> None:
    if problems := verify(module):
        raise UserError(*problems)
