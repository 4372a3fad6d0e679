"""Which layers are sparse and why the others are not, in sentences and in the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arachnec.ir.nodes import quantity
from arachnec.ir.parser import parse_module
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.sparse_stages import sparse_summaries
from arachnec.report import plan_report
from arachnec.views.explain import explain
from arachnec.views.format import ms
from arachnec.views.sparse_attention import of_stage

CASE = Path(__file__).parents[1] / "golden" / "lower" / "sparse_heads.cascade"


def test_a_plan_says_what_is_sparse_and_what_stays_dense() -> None:
    text = CASE.read_text().replace("query_group", 'dense = [["Block/cross", "its keys are no tokens"]], query_group')
    pipeline, module = Pipeline.parse(text.splitlines()[0].split("--passes ")[1]), parse_module(text)
    planned = pipeline.run(module)
    sentences = next(section.sentences for section in explain(planned) if section.title == "Sparse attention")
    assert sentences[0] == (
        "In @dit all layers may attend to chosen keys: predicted 19.8 % of the keys, from 4 % to 50 % by head."
    )
    assert sentences[1] == "1 of 2 cascades do, from 32760 tokens a clip on."
    assert "stay dense, up to 16 tokens a clip: choosing keys and learning which" in sentences[2]
    assert "cut between query groups" in sentences[3]
    assert sentences[4] == "`Block/cross` of @dit attends to all keys: its keys are no tokens."
    (row,) = plan_report(planned, 0.0)["sparse"]
    assert row["stage"] == "dit"
    assert (row["layers"], row["cascades"], row["dense_cascades"]) == (2, 1, 1)
    assert 1 < row["head_imbalance"] < 1.05


def test_one_cascade_of_one_token_is_told_as_one() -> None:
    text = CASE.read_text()
    planned = Pipeline.parse(text.splitlines()[0].split("--passes ")[1]).run(parse_module(text))
    (summary,) = sparse_summaries(planned)
    one = replace(summary.chosen[0], tokens=1)
    assert "1 of 1 cascade does, from 1 token a clip on." in of_stage(replace(summary, chosen=(one,), dense=()))


def test_a_dense_plan_says_nothing_of_it() -> None:
    text = "".join(line for line in CASE.read_text().splitlines(keepends=True) if "density" not in line)
    planned = Pipeline.parse(text.splitlines()[0].split("--passes ")[1]).run(parse_module(text))
    assert not [section for section in explain(planned) if section.title == "Sparse attention"]
    assert plan_report(planned, 0.0)["sparse"] == []


def test_what_layers_learn_is_no_part_of_the_optimizer() -> None:
    text = CASE.read_text()
    planned = Pipeline.parse(text.splitlines()[0].split("--passes ")[1]).run(parse_module(text))
    (plan,) = (section.sentences for section in explain(planned) if section.title == "The plan")
    ends = {i.op: quantity(i.attrs["time"]) for program in planned.programs for i in program.instructions[-3:]}
    told = f"{ms(ends['step'])} of optimizer and {ms(ends['learn'])} in which ranks add up what sparse layers learn."
    assert plan[0].endswith(told), plan[0]
