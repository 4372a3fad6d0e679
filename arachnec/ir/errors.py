"""Errors of a module that parsed: one Diagnostic per rule of the verifier."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic

# attributes


@dataclass(frozen=True)
class OutOfBounds(Diagnostic):
    title = "`{name}` of {node} has {found}"
    label = "expected {expected}"
    help = "`{name}`: {meaning}"
    node: str
    name: str
    found: str
    expected: str
    meaning: str


# names


@dataclass(frozen=True)
class DuplicateName(Diagnostic):
    title = "there are two of {node}"
    label = "the second"
    help = "give each its own name"
    node: str


# cascades


@dataclass(frozen=True)
class WrongShards(Diagnostic):
    title = "{node} has shards {what}"
    label = "expected {expected}"
    node: str
    what: str
    expected: str


# graphs
