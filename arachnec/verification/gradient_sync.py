"""Rule 1, of sums: every gradient is all-reduced once over all ranks that compute it, clipped by one norm, stepped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from arachnec.analysis.stage_ranks import Ranks, norm_ranks, resident_ranks, tied_ranks
from arachnec.analysis.uses import BACKWARDS, Values, bucket_of, gib, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.nodes import Instruction, Module, Program, integers
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import layers_of, tied_sets

TOLERANCE = 1e-9  # of a time that was computed twice


def _not_reduced(span: Span | None, rank: int, stage: str, reason: str) -> Mistake:
    return Mistake(
        span,
        f"the gradient of @{stage} on rank {rank} is not all-reduced: {reason}",
        kind="not reduced",
        label=reason,
        help=(
            f"after its last backward, every rank that computes gradients of @{stage} takes part in one `reduce "
            f"@{stage}`"
        ),
    )


def _wrong_buckets(span: Span | None, rank: int, stage: str, reason: str) -> Mistake:
    return Mistake(
        span,
        f"the gradient buckets of @{stage} on rank {rank} do not hold every layer once: {reason}",
        kind="wrong bucket layers",
        label=reason,
        help=f"every layer is in the `layers` of exactly one `reduce @{stage}`, and exactly one has `rest = true`",
    )


def check_gradient_sync(values: Values) -> Iterator[Diagnostic]:
    """After the last backward of a stage, every rank with gradients of it joins one all-reduce, then one step."""
    with_gradient: dict[str, set[int]] = defaultdict(set)
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    for program in values.module.programs:
        last: dict[str, int] = {}
        reduces: dict[str, list[int]] = defaultdict(list)
        steps: dict[str, list[int]] = defaultdict(list)
        for index, instruction in enumerate(program.instructions):
            if instruction.op == "reduce" and "tied" not in instruction.attrs:
                reduces[instruction.target].append(index)
                groups.setdefault((instruction.target, instruction.peers), program.rank)
            elif instruction.op == "step":
                steps[instruction.target].append(index)
            elif instruction.op in BACKWARDS:
                stage = values.cascades[instruction.target].stage
                last[stage] = index
                with_gradient[stage].add(program.rank)
        for stage in sorted({*last, *reduces, *steps}):
            yield from _buckets(values, program, stage, [program.instructions[i] for i in reduces[stage]])
            yield from _order(values, program, stage, last.get(stage), reduces[stage], steps[stage])
        yield from _shares(values, program)
    in_cells = {stage.name for stage in values.module.stages if (cell_of(stage) or 1) > 1}
    holders = _holders(values.module)
    for (stage, peers), _ in groups.items():
        if stage in in_cells:  # each shard has ranks of its own: `verification.gathers`
            continue
        span, held_by = values.module.stage(stage).span, holders.get(stage, frozenset())
        for rank in sorted(with_gradient[stage] - set(peers)):
            yield _not_reduced(span, rank, stage, f"it is missing from {rank_list(peers)}")
        for rank in sorted(held_by - with_gradient[stage] - set(peers)):
            yield Mistake(
                span,
                f"rank {rank} holds @{stage} and is left out of its all-reduce on {rank_list(peers)}",
                kind="left out",
                label=f"rank {rank} keeps the old parameters",
                help=(
                    f"every rank that holds @{stage} joins `reduce @{stage}` and `step @{stage}`, also where it "
                    "trained no clip"
                ),
            )


def _holders(module: Module) -> dict[str, frozenset[int]]:
    """The ranks that hold each trained stage."""
    if module.cluster is None:
        return {}
    return {stage.name: resident_ranks(module, module.cluster, stage) for stage in module.stages if stage.trained}


def _shares(values: Values, program: Program) -> Iterator[Diagnostic]:
    """A rank updates its parts of all stages that are dealt out, over the ranks that gradients are scattered among."""
    first: Instruction | None = None
    for reduce in program.instructions:
        if reduce.op != "reduce" or "tied" in reduce.attrs:
            continue
        ranks = values.module.stage(reduce.target).attrs.get("sharded")
        if not isinstance(ranks, int):
            continue
        first = first or reduce
        reason = f"rank {program.rank} has `{written(reduce)}`"
        if len(reduce.peers) == ranks:
            if set(reduce.peers) == set(first.peers):
                continue
            reason += f" and `{written(first)}`"
        yield Mistake(
            reduce.span,
            f"the optimizer of @{reduce.target} is dealt out over {ranks} ranks, and {reason}",
            kind="wrong share",
            label=reason,
            help="all stages of a rank that are `sharded` have one `reduce` over the ranks that hold the parts",
        )


def _buckets(values: Values, program: Program, stage: str, reduces: list[Instruction]) -> Iterator[Diagnostic]:
    """Either one reduce of the stage, or buckets that hold every layer once and the rest once."""
    buckets = [(reduce, bucket) for reduce in reduces if (bucket := bucket_of(reduce)) is not None]
    if not buckets or len(buckets) < len(reduces):
        if len(reduces) != 1:
            yield _not_reduced(program.span, program.rank, stage, f"it takes part in {len(reduces)} reduces")
        return
    layers = len(layers_of(values.module.stage(stage)))
    counts = Counter(layer for _, bucket in buckets for layer in bucket[0])
    for reduce, bucket in buckets:
        if bucket == ((), False):
            yield _wrong_buckets(reduce.span, program.rank, stage, "a bucket holds nothing")
        for layer in bucket[0]:
            if not 0 <= layer < layers:
                reason = f"layer {layer} is not one of its {layers}"
                yield _wrong_buckets(reduce.span, program.rank, stage, reason)
            elif counts[layer] > 1:
                reason = f"layer {layer} is in {counts[layer]} buckets"
                yield _wrong_buckets(reduce.span, program.rank, stage, reason)
    for layer in range(layers):
        if not counts[layer]:
            yield _wrong_buckets(program.span, program.rank, stage, f"layer {layer} is in no bucket")
    rest = [reduce for reduce, bucket in buckets if bucket[1]]
    if len(rest) != 1:
        span = rest[1].span if rest else program.span
        count = len(rest) or "no"
        reason = f"what lies outside the layers is in {count} bucket{'s' if rest else ''}"
        yield _wrong_buckets(span, program.rank, stage, reason)


def _order(
    values: Values, program: Program, stage: str, last: int | None, reduces: list[int], steps: list[int]
) -> Iterator[Diagnostic]:
    """Reduces come after the last backward, or start inside it, and before the one step."""
    span, rank = program.span, program.rank
    backward = None if last is None else program.instructions[last]
    if last is not None and reduces and reduces[0] < last:
        yield _not_reduced(span, rank, stage, "a backward comes after the reduce")
    later = None
    for reduce in (program.instructions[index] for index in reduces):
        if "early" not in reduce.attrs:
            later = reduce
            continue
        early = gib(reduce, "early")
        if backward is None:
            reason = "this rank has no backward of the stage"
        elif not 0 <= early <= gib(backward, "time") * (1 + TOLERANCE):
            reason = f"its backward takes {gib(backward, 'time'):g} ms"
        elif later is not None:
            reason = f"`{written(later)}` above it starts later"
        elif (bucket := bucket_of(reduce)) is None or bucket[1]:
            reason = "gradients outside the layers are complete last"
        else:
            continue
        yield Mistake(
            reduce.span,
            f"rank {rank} cannot start `{written(reduce)}` inside a backward: {reason}",
            kind="wrong start",
            label=reason,
            help="drop its `early`: it then starts where it stands in the rank's list",
        )
    if reduces and (len(steps) != 1 or steps[0] < reduces[-1]):
        reason = "steps before the all-reduce" if len(steps) == 1 else f"steps {len(steps)} times"
        yield Mistake(
            span,
            f"rank {rank} holds the all-reduced gradient of @{stage} and {reason}",
            kind="not stepped",
            label=reason,
            help=f"every rank of `reduce @{stage}` has one `step @{stage}` after it, or the copies drift apart",
        )


def _tied_not_reduced(span: Span | None, rank: int, tied: Ranks, reason: str, ranks: Ranks) -> Mistake:
    return Mistake(
        span,
        f"the gradient of what stages {rank_list(tied)} share is not all-reduced on rank {rank}: {reason}",
        kind="tied not reduced",
        label=reason,
        help=(
            "after the last backward of these stages, each of their ranks takes part in one `reduce` on "
            f"{rank_list(ranks)} with `tied = {rank_list(tied)}`"
        ),
    )


def check_gradient_norm(values: Values) -> Iterator[Diagnostic]:
    places = _places(values)
    stages = values.module.stages
    tied = {pair[0] for stage in stages for pair in tied_sets(stage.attrs.get("tied"))}
    groups = {parts: ranks for parts in sorted(tied) if (ranks := tied_ranks(parts, stages, places))}
    for program in values.module.programs:
        yield from _tied(values, program, groups)
        yield from _norm(values, program, places)


def _places(values: Values) -> dict[str, set[int]]:
    """The ranks of every trained stage: those of its all-reduces."""
    places: dict[str, set[int]] = defaultdict(set)
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "reduce" and "tied" not in step.attrs and step.target in values.trained:
                places[step.target].update(step.peers)
    return places


def _tied(values: Values, program: Program, groups: Mapping[Ranks, Ranks]) -> Iterator[Diagnostic]:
    steps = program.instructions
    reduces = [(at, step) for at, step in enumerate(steps) if step.op == "reduce" and "tied" in step.attrs]
    last = max((at for at, step in enumerate(steps) if step.op in ("backward", "weight")), default=0)
    for at, step in reduces:
        parts = integers(step.attrs["tied"])
        ranks = groups.get(parts)
        if ranks is None:
            reason = "they share nothing that lies on different ranks"
        elif step.peers != ranks:
            reason = f"it is over ranks {rank_list(step.peers)}"
        elif at < last:
            reason = "a backward comes after the reduce"
        else:
            continue
        yield _tied_not_reduced(step.span, program.rank, parts, reason, ranks or ())
    for parts, ranks in groups.items():
        count = sum(integers(step.attrs["tied"]) == parts for _, step in reduces)
        if program.rank in ranks and count != 1:
            reason = f"it takes part in {count} reduces"
            yield _tied_not_reduced(program.span, program.rank, parts, reason, ranks)


def _norm(values: Values, program: Program, places: Mapping[str, set[int]]) -> Iterator[Diagnostic]:
    steps, stages = program.instructions, values.module.stages
    for stage in stages:
        if program.rank not in places.get(stage.name, ()):
            continue
        expected = norm_ranks(stage, program.rank, stages, places)
        norms = [at for at, step in enumerate(steps) if step.op == "norm" and _clips(values, step, stage.name)]
        reason, at = _reason(steps, norms, expected)
        if reason:
            span = program.span if at is None else steps[at].span
            yield Mistake(
                span,
                f"rank {program.rank} clips the gradients of @{stage.name} by a norm that is not that of all: {reason}",
                kind="norm not summed",
                label=reason,
                help=(
                    "between its last `reduce` and its first `step`, every rank has one `norm` on "
                    f"{rank_list(expected)}"
                ),
            )


def _reason(steps: tuple[Instruction, ...], norms: list[int], expected: Ranks) -> tuple[str, int | None]:
    """What is wrong with the norms by which a stage's gradients are clipped, and where; empty where nothing is."""
    if not expected:
        return ("this rank has all gradients itself", norms[0]) if norms else ("", None)
    if len(norms) != 1:
        return f"it is summed {len(norms)} times", norms[1] if norms else None
    (at,) = norms
    if steps[at].peers != expected:
        return f"it is summed over ranks {rank_list(steps[at].peers)}", at
    if any(step.op == "reduce" for step in steps[at:]):
        return "a reduce comes after it", at
    if any(step.op == "step" for step in steps[:at]):
        return "a step comes before it", at
    return "", None


def _clips(values: Values, norm: Instruction, stage: str) -> bool:
    """Whether a norm is that of the gradients of a stage: its own, or its model's."""
    target, own = values.module.stage(norm.target), values.module.stage(stage)
    return target.attrs.get("part_of", target.name) == own.attrs.get("part_of", own.name)
