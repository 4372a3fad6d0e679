"""Values do not change: what is frozen, and what of a value is no part of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "arachnec"
# Of plans and proofs, and what carries them out.
ROOMS = (
    "analysis", "cost", "fusion", "ir", "lowering", "model_state", "passes", "pipelining", "planning", "simulation",
    "solver", "sparsity", "spmd", "verification",
)  # fmt: skip


def options(call: ast.expr, name: str) -> dict[str, object] | None:
    """The keywords of a decorator or call of this name; None for another one."""
    function = call.func if isinstance(call, ast.Call) else call
    if not isinstance(function, ast.Name) or function.id != name:
        return None
    words = call.keywords if isinstance(call, ast.Call) else []
    return {word.arg or "": getattr(word.value, "value", word.value) for word in words}


def dataclasses_of(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, dict[str, object]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                said = options(decorator, "dataclass")
                if said is not None:
                    yield node, said


def fields_of(kind: ast.ClassDef) -> dict[str, ast.expr | None]:
    lines = (line for line in kind.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name))
    return {line.target.id: line.value for line in lines if isinstance(line.target, ast.Name)}


def assigned(tree: ast.Module) -> set[str]:
    """The attributes of any object that a file gives another value."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            targets += node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            targets.append(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets.append(node.optional_vars)
    every = (part for target in targets for part in ast.walk(target))
    return {part.attr for part in every if isinstance(part, ast.Attribute)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_dataclass_is_frozen_unless_its_file_gives_a_field_another_value(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        changing = assigned(tree)
        for kind, said in dataclasses_of(tree):
            own = fields_of(kind)
            if not said.get("frozen"):
                mutable = [
                    name
                    for name, value in own.items()
                    if value is not None and options(value, "field") and not name.startswith("_")
                ]
                assert changing & own.keys() or mutable, f"{path}: {kind.name} may be frozen"
                continue
            for name, value in own.items():
                kept = options(value, "field") if value is not None else None
                if name.startswith("_") and kept is not None and "default_factory" in kept:
                    assert (kept.get("repr"), kept.get("compare")) == (False, False), f"{path}: {kind.name}.{name}"


def test_what_is_read_of_a_profile_is_frozen_and_an_unknown_key_an_error() -> None:
    tree = ast.parse((PACKAGE / "cost" / "profile.py").read_text(encoding="utf-8"))
    structs = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.keywords]
    assert len(structs) > 5
    for kind in structs:
        said = {word.arg: getattr(word.value, "value", None) for word in kind.keywords}
        assert said == {"frozen": True, "forbid_unknown_fields": True}, kind.name
