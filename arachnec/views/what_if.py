"""What a plan would come to if something were different. Every answer is planned anew, none is estimated.

The plan as it is is planned again too, with the same small budget, so that a difference is never one of search time
alone. What was decided once for the model is decided again where the machines differ, and held else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from arachnec.cluster.topology import mix_of
from arachnec.ir import tables
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Phase, Stage, integers
from arachnec.ir.sampling import is_sampling
from arachnec.ir.stage_sizes import times_of
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.passes.infra.base import Duration, Pass
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.views.format import ms
from arachnec.views.timeline import planned

MOST_STEPS = 10_000  # of a search that counts them
COUNTED = ("generations", "population", "limit")  # how large searches without a budget are
SAME = 0.005  # relative: what differs by less is what another search could come to as well
Change = Callable[[Module], Module]


@dataclass(frozen=True)
class Question:
    """``change`` is made to the traced module, or, of cascades, to the iteration once it is partitioned."""

    title: str
    change: Change
    of_cascades: bool = True


@dataclass(frozen=True)
class Answer:
    """``iteration_ms`` is what the new plan predicts; ``refused`` says why there is none."""

    title: str
    iteration_ms: float | None
    refused: str = ""


def what_if(traced: Module, model: Module, pipeline: Pipeline, plan: Module, budget_ms: float) -> tuple[Answer, ...]:
    """The plan as it is, planned again, and then every change that applies to it.

    ``traced`` is what ``pipeline`` begins with, ``model`` what its passes of scope ``model`` gave, and ``plan`` the
    lowered module that one iteration came to; without such passes the first two are the same. ``budget_ms`` is for each
    search; searches that count steps instead keep their count.
    """
    limited = with_budget(pipeline, budget_ms)

    def of_iteration(module: Module) -> Module:
        return replace(module, name=plan.name, clips=plan.clips, graphs=())

    def answered(question: Question) -> Answer:
        try:
            if question.of_cascades:
                return _answer(of_iteration(model), limited.iteration_part, question)
            laid = limited.run_model_part(question.change(traced))
            return Answer(question.title, planned(limited.run_iteration_part(of_iteration(laid))).end)
        except UserError as error:
            return Answer(question.title, None, str(error))

    return tuple(map(answered, (Question("as it is, planned again", lambda module: module), *questions(plan))))


def sentences(answers: Sequence[Answer]) -> list[str]:
    """One for each answer; the first answer is what the others are compared with."""
    baseline, *changes = answers
    first = [f"Planned again with that budget it takes {_time(baseline)}."]
    return first + [f"{answer.title}: {_compared(answer, baseline)}." for answer in changes]


def questions(plan: Module) -> Iterator[Question]:
    """What can be asked of a lowered module."""
    cluster = plan.cluster
    assert cluster is not None, "a lowered module has a cluster"
    larger = with_nodes(cluster, cluster.nodes + 1)
    yield Question(f"One more node ({larger.world} in all instead of {cluster.world})", _on(larger), of_cascades=False)
    roomy = with_memory(cluster, 2.0)
    size = "" if "mixed" in cluster.attrs else f" ({roomy.memory:.4g} GiB)"
    yield Question(f"Twice the memory on each{size}", _on(roomy), of_cascades=False)
    widest = max((c.degree for c in plan.cascades if c.phase is not Phase.ENCODE), default=1)
    if widest > 1:
        yield Question(f"No cascade on more than {_ranks(widest // 2)}", _at_most(widest // 2))
    if any("degrees" in stage.attrs and stage.trained for stage in plan.stages):
        yield Question("Every degree legal", _any_degree)
    if any(cascade.phase is Phase.ENCODE for cascade in plan.cascades) and not is_sampling(plan):
        yield Question("Encoders one step ahead, so that nothing waits for them", _without_inputs)
        yield Question("Clips encoded beforehand", _without_encoders)


def with_budget(pipeline: Pipeline, budget_ms: float) -> Pipeline:
    """The same passes, each with this budget that has one and does not count steps instead.

    Whoever asks may not have written them: more than ``MOST_STEPS`` are searched for the budget, and a search
    without one is never larger than by default.
    """
    return Pipeline(tuple(_limited(step, budget_ms) for step in pipeline.passes))


def with_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """The cluster with so many nodes; further ones are like its last."""
    return replace(cluster, attrs=cluster.attrs.updated(nodes=nodes, mixed=mix_of(cluster, nodes)))


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with ``factor`` times the memory on every device."""
    mixed = cluster.attrs.get("mixed")
    rows = tuple(_scaled(row, factor) for row in mixed) if isinstance(mixed, tuple) else None
    attrs = cluster.attrs.updated(memory=Quantity(cluster.memory * factor, "GiB"), mixed=rows)
    return replace(cluster, attrs=attrs)


def begin_of(plan: Module) -> Module:
    """A lowered module as it was before anything was scheduled: at level costed, for when no earlier one is at hand."""
    cascades = tuple(replace(c, attrs=_until_costed(c.attrs, tables.CASCADE)) for c in plan.cascades)
    attrs = Attributes.of(**{name: plan.attrs.get(name) for name in ("models", "switch", "decoder")})
    return replace(plan, level=Level.COSTED, cascades=cascades, reductions=(), steps=(), programs=(), attrs=attrs)


def _until_costed(attrs: Attributes, table: Mapping[str, tables.Row]) -> Attributes:
    """What a node says before anything is scheduled."""
    return Attributes(tuple((name, value) for name, value in attrs.pairs if table[name].since <= Level.COSTED))


def _answer(iteration: Module, pipeline: Pipeline, question: Question) -> Answer:
    first = _until_partitioned(iteration, pipeline)
    module = question.change(Pipeline(pipeline.passes[:first]).run(iteration))
    return Answer(question.title, planned(pipeline.after(first).run(module)).end)


def _until_partitioned(begin: Module, pipeline: Pipeline) -> int:
    """How many passes there are until the module has cascades."""
    level = begin.level
    for number, step in enumerate(pipeline.passes):
        if level >= Level.PARTITIONED:
            return number
        level = step.result(level)
    return len(pipeline.passes)


def _limited(step: Pass, budget_ms: float) -> Pass:
    default: dict[str, Any] = {field.name: field.default for field in fields(step)}
    changed: dict[str, Any] = {n: default[n] for n in COUNTED if getattr(step, n, 0) > default.get(n, 0)}
    steps = getattr(step, "steps", None)
    if "budget" in default and (steps is None or steps > MOST_STEPS):
        changed |= {"budget": Duration(budget_ms)} | ({"steps": None} if steps is not None else {})
    limited: Pass = replace(step, **changed)
    return limited


def _scaled(row: Value, factor: float) -> Value:
    assert isinstance(row, tuple), "the table of the cluster's attributes says so"
    return tuple(
        Quantity(value.value * factor, "GiB") if isinstance(value, Quantity) and value.unit == "GiB" else value
        for value in row
    )


def _on(cluster: Cluster) -> Change:
    return lambda module: replace(module, cluster=cluster)


def _at_most(limit: int) -> Change:
    def change(module: Module) -> Module:
        return replace(
            module,
            stages=tuple(_stage_at_most(stage, limit) for stage in module.stages),
            cascades=tuple(_cascade_at_most(cascade, limit) for cascade in module.cascades),
        )

    return change


def _stage_at_most(stage: Stage, limit: int) -> Stage:
    if not stage.trained:
        return stage
    listed = stage.attrs.get("degrees")
    legal = range(1, limit + 1) if listed is None else [degree for degree in integers(listed) if degree <= limit]
    return replace(stage, attrs=stage.attrs.updated(degrees=tuple(legal)))


def _cascade_at_most(cascade: Cascade, limit: int) -> Cascade:
    times = times_of(cascade)
    if not times or min(times) > limit:
        return cascade
    return cascade.with_attrs(times=tuple((d, Quantity(time, "ms")) for d, time in times.items() if d <= limit))


def _any_degree(module: Module) -> Module:
    stages = (replace(s, attrs=s.attrs.updated(degrees=None)) if s.trained else s for s in module.stages)
    return replace(module, stages=tuple(stages))


def _without_inputs(module: Module) -> Module:
    encoded = {cascade.name for cascade in module.cascades if cascade.phase is Phase.ENCODE}
    cascades = (replace(c, inputs=tuple(name for name in c.inputs if name not in encoded)) for c in module.cascades)
    return replace(module, cascades=tuple(cascades))


def _without_encoders(module: Module) -> Module:
    gone = {cascade.stage for cascade in module.cascades if cascade.phase is Phase.ENCODE}
    return replace(
        module,
        stages=tuple(stage for stage in module.stages if stage.name not in gone),
        cascades=tuple(c for c in _without_inputs(module).cascades if c.phase is not Phase.ENCODE),
    )


def _compared(answer: Answer, baseline: Answer) -> str:
    if answer.iteration_ms is None or not baseline.iteration_ms:
        return _time(answer)
    change = answer.iteration_ms / baseline.iteration_ms - 1
    if abs(change) < SAME:
        return f"{_time(answer)}, no difference to speak of"
    return f"{_time(answer)}, {abs(change):.1%} {'more' if change > 0 else 'less'}".replace("%", " %")


def _time(answer: Answer) -> str:
    return f"no plan ({answer.refused})" if answer.iteration_ms is None else ms(answer.iteration_ms)


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"
