"""The tables and the documentation say the same; the verifier never crashes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir import kinds, tables
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.limits import MOST_MISTAKES
from arachnec.ir.nodes import STAGE_OPS, Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import check_module, verify
from tests.ir.strategies import any_module, right_module

ROOT = Path(__file__).parents[2]
TABLES = {
    "module": tables.MODULE,
    "cluster": tables.CLUSTER,
    "clip": tables.CLIP,
    "stage": tables.STAGE,
    "fused": tables.FUSED,
    "cascade": tables.CASCADE,
    "reduce": tables.REDUCE,
    "step": tables.STEP,
    "program": tables.PROGRAM,
    **{f"instruction {op}": table for op, table in tables.INSTRUCTION.items()},
}


def test_every_instruction_of_a_stage_has_a_table() -> None:
    assert set(STAGE_OPS) <= set(tables.INSTRUCTION)


@pytest.mark.parametrize("name", TABLES)
def test_every_type_in_a_table_is_one(name: str) -> None:
    for row in TABLES[name].values():
        assert kinds.test(row.kind)(object()) is False  # type: ignore[arg-type]
        assert kinds.name(row.kind)


def markdown(table: dict[str, tables.Row]) -> str:
    lines = ["| attribute | type | from level | | meaning |", "|---|---|---|---|---|"]
    for row in table.values():
        need = "required" if row.required else "optional"
        lines.append(f"| `{row.name}` | {row.kind} | {row.since.word} | {need} | {row.meaning} |")
    return "\n".join(lines)


BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"


def test_the_reference_holds_the_tables(request: pytest.FixtureRequest) -> None:
    """``--update-golden`` writes them."""
    reference = ROOT / "docs" / "ir.md"
    before, _, rest = reference.read_text(encoding="utf-8").partition(BEGIN)
    shown, _, after = rest.partition(END)
    wanted = "".join(f"\n### {name}\n\n{markdown(table)}\n" for name, table in TABLES.items() if table) + "\n"
    if request.config.getoption("--update-golden"):
        reference.write_text(before + BEGIN + wanted + END + after, encoding="utf-8")
        shown = wanted
    assert shown == wanted


def titles() -> Iterator[tuple[str, str]]:
    """Each message of the verifier: the file, and a pattern of its first line."""
    ir = ROOT / "arachnec/ir"
    for path in (ir / "verify.py", ir / "names.py", *ir.glob("*_rules.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mistake":
                title = node.args[1]
                parts = title.values if isinstance(title, ast.JoinedStr) else [title]
                yield path.name, "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in parts)


def test_every_message_has_a_golden_error() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests/golden/verify").glob("*.expect")]
    wanting = [(f, t) for f, t in titles() if not any(re.search(f"^error: {t}$", x, re.MULTILINE) for x in texts)]
    assert len(list(titles())) > 50
    assert not wanting, wanting


@settings(max_examples=25)
@given(level=st.sampled_from(list(Level)), data=st.data())
def test_any_module_gets_messages_and_never_a_traceback(level: Level, data: st.DataObject) -> None:
    module = data.draw(any_module(level))
    for problem in verify(parse_module(print_module(module))):
        assert render(problem).startswith("error: ")


@settings(max_examples=20)
@given(module=right_module(Level.PLACED), data=st.data())
def test_text_cut_anywhere_gets_one_message(module: Module, data: st.DataObject) -> None:
    text = print_module(module).rstrip()
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    with pytest.raises(UserError) as caught:
        parse_module(cut)
    assert len(caught.value.diagnostics) == 1
    assert render(caught.value.diagnostics[0])


def test_a_file_of_graphs_needs_no_cluster() -> None:
    text = 'module @m attributes { level = "traced" } { graph @A (%x : f32[S]) -> (%x) [] }'
    assert verify(parse_module(text)) == ()


def test_check_module_raises_all_that_verify_finds() -> None:
    module = parse_module('module @m attributes { level = "scheduled", a = 1 } {}')
    with pytest.raises(UserError) as caught:
        check_module(module)
    assert caught.value.diagnostics == verify(module)
    assert len(caught.value.diagnostics) == 4


def test_of_many_mistakes_the_first_are_found() -> None:
    """A near name for each would take longer than reading them all."""
    wrong = ", ".join(f"x{number} = 1" for number in range(2 * MOST_MISTAKES))
    assert len(verify(parse_module(f'module @m attributes {{ level = "traced", {wrong} }} {{}}'))) == MOST_MISTAKES
