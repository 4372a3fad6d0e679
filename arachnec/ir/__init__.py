"""Floor 1: the cascade IR. Imports no torch.

``arachnec.ir.parse_module``, ``parse_file``, ``print_module``, ``check_module``, ``UserError``; the nodes are in
``arachnec.ir.nodes``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arachnec.ir.diagnostic import UserError
    from arachnec.ir.parser import parse_file, parse_module
    from arachnec.ir.printer import print_module
    from arachnec.ir.verify import check_module

__all__ = ["UserError", "check_module", "parse_file", "parse_module", "print_module"]

_HOMES = {
    "UserError": "diagnostic",
    "check_module": "verify",
    "parse_file": "parser",
    "parse_module": "parser",
    "print_module": "printer",
}


def __getattr__(name: str) -> Any:
    # lark is imported only by those who parse
    if name in _HOMES:
        return getattr(importlib.import_module(f"arachnec.ir.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'arachnec.ir' has no attribute {name!r}")
