"""A forward names the kernel family of its attention: its cascade's, the pass's, or the best of the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.backends.torch_distributed.executor.attention import attention_by_grid, attention_of, precision_of
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Span, Stage
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes
from arachnec.lowering.programs import demand_known, lower, with_attention
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.report import plan_report
from tests.passes.plans import cluster, equal_clips, module_of, timed

torch = pytest.importorskip("torch")
CPU = torch.device("cpu")


def plan(device: str = "h100-80g", dtype: str | None = "bf16", hidden: int | None = 1536, **named: str) -> Module:
    cascades = [
        timed("e", Phase.ENCODE, 0, 1000, (), (0.0, 2.0), (0,)),
        timed("t", Phase.TRAIN, 0, 1000, ("e",), (2.0, 32.0), (0, 1)).with_attrs(ulysses=1, ring=2, **named),
    ]
    module = module_of(cluster(), equal_clips(), cascades)
    assert module.cluster is not None
    stages = tuple(
        replace(s, attrs=s.attrs.updated(hidden=hidden, heads=12, dtype=dtype)) if s.trained else s
        for s in module.stages
    )
    pod = replace(module.cluster, attrs=module.cluster.attrs.updated(device=device))
    return replace(module, stages=stages, cluster=pod)


def named(module: Module) -> set[object]:
    steps = [step for program in module.programs for step in program.instructions]
    assert all("attention" not in step.attrs for step in steps if step.op != "forward")
    return {step.attrs.get("attention") for step in steps if step.op == "forward"}


@pytest.mark.parametrize(
    ("device", "dtype", "hidden", "family"),
    [
        ("h100-80g", "bf16", 1536, "cudnn"),
        ("h100-80g", "f32", 1536, "efficient"),
        ("h100-80g", "bf16", 12 * 256, "flash2"),
        ("a100-80g", "bf16", 1536, "flash2"),
        ("l20-48g", "bf16", 1536, "flash2"),
        ("cpu", "f32", 1536, "cpu-flash"),
        ("h100-80g", "bf16", None, None),
        ("of-my-own", "bf16", 1536, None),
    ],
)
def test_the_family_follows_from_device_precision_and_heads(
    device: str, dtype: str, hidden: int | None, family: str | None
) -> None:
    lowered = lower(plan(device, dtype, hidden))
    assert named(lowered) == {family}
    assert parse_module(print_module(lowered)) == lowered


def test_devices_of_several_kinds_choose_in_the_run() -> None:
    module = plan()
    assert module.cluster is not None
    mixed = replace(module.cluster, attrs=module.cluster.attrs.updated(mixed=()))
    *_, train = with_attention(module.cascades, module.stages, mixed, None)
    assert "attention" not in train.attrs


def test_what_the_cascade_or_the_pass_names_comes_first() -> None:
    assert named(lower(plan(attention="math"))) == {"math"}
    assert named(Pipeline.parse("lower{attention=flash3}").run(plan())) == {"flash3"}
    assert named(Pipeline.parse("lower{attention=flash3}").run(plan(attention="flash2"))) == {"flash2"}


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="there is no attention back end `flesh2`"):
        lower(plan(attention="flesh2"))
    stage, forward = plan().stages[-1], Instruction("forward", "t", (0,), Attributes.of(attention="flesh2"))
    with pytest.raises(UserError, match="flesh2"):
        attention_of(forward, stage, "f32", CPU)


def forward_and_stage(module: Module) -> tuple[Instruction, Stage]:
    lowered = lower(module)
    forward = next(step for step in lowered.programs[0].instructions if step.op == "forward")
    cascade: Cascade = next(c for c in lowered.cascades if c.name == forward.target)
    return forward, next(stage for stage in lowered.stages if stage.name == cascade.stage)


def test_a_run_keeps_what_is_named_where_its_device_can_and_its_precision_is_the_plan_s() -> None:
    assert attention_of(*forward_and_stage(plan()), "bf16", CPU) == "cpu-flash", "planned for another device"
    assert attention_of(*forward_and_stage(plan(attention="math")), "bf16", CPU) == "math"
    assert attention_of(*forward_and_stage(plan(attention="math")), "f32", CPU) == "cpu-flash"
    assert attention_of(*forward_and_stage(plan(hidden=None)), "bf16", CPU) is None


def test_a_run_that_asks_for_no_precision_attends_in_the_one_that_the_model_was_built_in() -> None:
    built = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.LayerNorm(4))
    built.append(torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    built[0].weight.data = torch.empty(0, dtype=torch.bfloat16)  # released, in a cell of ranks
    assert precision_of(built) == "bf16"
    assert precision_of(torch.nn.Linear(2, 2)) == precision_of(torch.nn.Identity()) == "f32"


def test_plan_and_run_report_the_family() -> None:
    lowered = lower(plan(attention="math"))
    rows = {row["name"]: row["attention"] for row in plan_report(lowered, 0.0)["cascades"]}
    assert rows == {"e": None, "t": "math"}
    assert attention_by_grid(lowered, "bf16", CPU) == {"ulysses 1 x ring 2": "math"}
    assert attention_by_grid(lower(plan()), "bf16", CPU) == {"ulysses 1 x ring 2": "cpu-flash"}


def test_a_family_that_there_is_not_is_told_at_its_name_or_else_at_its_cascade() -> None:
    for written, line in ((named_at(7), 7), (Attributes.of(attention="nonsense"), 3)):
        cascade = Cascade("t", Phase.TRAIN, "dit", (0,), 1, 4, 0, (), written, Span("here", 3, 1, 3, 2))
        with pytest.raises(UserError) as caught:
            demand_known("nonsense", cascade)
        (problem,) = caught.value.diagnostics
        assert problem.span is not None and problem.span.line == line


def named_at(line: int) -> Attributes:
    return Attributes((("attention", "nonsense"),), (Span("here", line, 1, line, 2),))
