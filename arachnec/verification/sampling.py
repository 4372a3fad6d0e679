"""Rule 1, of sampling: every request takes each of its steps once, with the right model, whatever its switch comes to.

The segments of a request form one chain: each reads the latents of the one before. Walked in order at every outcome of
the switch, they take the steps 0, 1, ... to the last. A program has every segment on all of its ranks, once, at every
outcome: one that has nothing to do hands its input on. So no order, no message and no claim of memory depends on the
outcome, and what the other rules prove of a program holds for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from arachnec.analysis.uses import PHASES, Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.nodes import Cascade, Clip, Instruction, Phase, Span, integer
from arachnec.ir.sampling import chain_of, models_of, outcomes_of, segment_of, steps_taken

SAMPLING = (Phase.ENCODE, Phase.DENOISE, Phase.DECODE)


def _wrong_round(span: Span | None, rank: int, step: Instruction, number: int, reason: str) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} has `{written(step)}` in round {number}, and {reason}",
        kind="wrong round",
        label=f"round {number}",
        help="every rank comes to `replan` of each round once, in order, and runs a cascade in the round that it says",
    )


def check_sampling(values: Values) -> Iterator[Diagnostic]:
    """Of modules whose clips are requests; others are not planned again within a program."""
    requests = [clip for clip in values.module.clips if "steps" in clip.attrs]
    if not requests:
        for program in values.module.programs:
            for step in program.instructions:
                if step.op == "replan":
                    yield _wrong_round(step.span, program.rank, step, 0, "no clip is a request with a switch")
        return
    own: dict[int, list[Cascade]] = defaultdict(list)
    for cascade in values.module.cascades:
        for number in cascade.clips if cascade.phase in SAMPLING else ():
            own[number].append(cascade)
    for clip in requests:
        yield from _request(clip, own[clip.id], models_of(values.module))
    encoders = {
        number: [cascade.stage for cascade in cascades if cascade.phase is Phase.ENCODE]
        for number, cascades in own.items()
    }
    for cascade in values.module.cascades:
        yield from _inputs(values, cascade, encoders)
    yield from _runs(values)
    yield from _rounds(values)


def _rounds(values: Values) -> Iterator[Diagnostic]:
    """Where a rank may be given other instructions: at the same rounds as all ranks."""
    last = max((cascade.round for cascade in values.module.cascades), default=0)
    for program in values.module.programs:
        at = 0
        for step in program.instructions:
            if step.op == "replan":
                if step.attrs.get("round") != at + 1:
                    yield _wrong_round(step.span, program.rank, step, at, f"{at + 1} is next")
                at += 1
            elif step.op in PHASES and values.cascades[step.target].round != at:
                own = values.cascades[step.target].round
                yield _wrong_round(step.span, program.rank, step, at, f"its cascade is of round {own}")
        if at != last:
            where = Instruction("replan", models_of(values.module)[0])
            reason = f"its list ends there, of {last + 1} rounds"
            yield _wrong_round(program.span, program.rank, where, at, reason)


def _request(clip: Clip, own: Sequence[Cascade], models: Sequence[str]) -> Iterator[Diagnostic]:
    steps = integer(clip.attrs["steps"])
    segments = [cascade for cascade in own if cascade.phase is Phase.DENOISE]
    if not segments:
        yield Mistake(
            clip.span,
            f"no cascade denoises request {clip.id}",
            kind="not denoised",
            label=f"takes none of its {steps} steps",
            help="every request has a chain of denoise cascades over all of its steps",
        )
        return
    chain = chain_of(segments, clip.id)
    if len(chain) != len(segments):
        left = [cascade for cascade in segments if cascade not in chain] or segments
        names = ", ".join(f"%{cascade.name}" for cascade in segments)
        yield Mistake(
            left[0].span,
            f"the segments of request {clip.id} are no chain: {names}",
            kind="no chain",
            label="beside the others",
            help="each segment but the first reads one other segment of its request, no two the same",
        )
        return
    for outcome in outcomes_of(clip):
        problem = _walk(clip, chain, models, steps, outcome)
        if problem is not None:
            yield problem
            break
    for cascade in own:
        if cascade.phase is Phase.DECODE and chain[-1].name not in cascade.inputs:
            last = chain[-1].name
            yield Mistake(
                cascade.span,
                f"%{cascade.name} decodes request {clip.id} before its last segment %{last} has run",
                kind="wrong decode",
                label=f"does not read %{last}",
                help="a decode reads the last segment of each of its requests",
            )


def _walk(clip: Clip, chain: Sequence[Cascade], models: Sequence[str], steps: int, outcome: int) -> Diagnostic | None:
    """What is wrong with the steps that a chain takes at one outcome; None where nothing is."""
    following = 0
    for cascade in chain:
        after = cascade.stage in models[1:]
        taken = steps_taken(segment_of(cascade), after, outcome)
        if not taken:
            continue
        if taken[0] != following:
            reason = "was taken before" if taken[0] < following else "comes too early"
            return Mistake(
                cascade.span,
                f"%{cascade.name} takes step {taken[0]} of request {clip.id} where {outcome} steps are before "
                f"its switch, and {following} is next",
                kind="wrong step",
                label=f"step {taken[0]} {reason}",
                help="at every outcome of the switch, a chain takes every step once, in order",
            )
        following = taken[-1] + 1
    if following != steps:
        return Mistake(
            chain[-1].span,
            f"request {clip.id} ends before step {following} of {steps}, where {outcome} are before its switch",
            kind="steps left",
            label="its last segment",
            help="at every outcome of the switch, a chain takes every step once, in order",
        )
    return None


def _inputs(values: Values, cascade: Cascade, encoders: Mapping[int, Sequence[str]]) -> Iterator[Mistake]:
    """``encoders`` are those that run for each request."""
    if cascade.phase not in (Phase.DENOISE, Phase.DECODE):
        return
    sources = [values.cascades[name] for name in cascade.inputs if name in values.cascades]
    requests = rank_list(cascade.clips)
    for source in sources:
        if source.phase is Phase.ENCODE:
            its_own = set(cascade.clips) <= set(source.clips)
        else:
            its_own = cascade.clips == source.clips  # its latents lie one behind the other
        if not its_own:
            yield Mistake(
                cascade.span,
                f"%{cascade.name} of requests {requests} reads %{source.name}, which is of requests "
                f"{rank_list(source.clips)}",
                kind="other requests",
                label="another request's",
                help=(
                    "a segment reads the text of all of its requests, and the latents of these requests in the same "
                    "order"
                ),
            )
            return
    counts = Counter(source.stage for source in sources if source.phase is Phase.ENCODE)
    if cascade.phase is Phase.DENOISE:
        for stage in dict.fromkeys(stage for number in cascade.clips for stage in encoders.get(number, ())):
            if counts[stage] != 1:
                yield Mistake(
                    cascade.span,
                    f"%{cascade.name} reads {counts[stage]} cascades of @{stage} instead of one",
                    kind="text not read once",
                    label=f"its requests are {requests}",
                    help="where an encoder runs for a request, each segment reads that from one cascade of it",
                )


def _runs(values: Values) -> Iterator[Diagnostic]:
    """Every rank of a cascade's group runs it exactly once, as that group."""
    ops = {phases[0]: op for op, phases in PHASES.items() if phases[0] in SAMPLING}
    counts: Counter[tuple[str, int]] = Counter()
    spans: dict[tuple[str, int], Span | None] = {}
    for program in values.module.programs:
        for instruction in program.instructions:
            cascade = values.cascades.get(instruction.target)
            if cascade is None or ops.get(cascade.phase) != instruction.op:
                continue
            counts[cascade.name, program.rank] += 1
            spans[cascade.name, program.rank] = instruction.span
            if instruction.peers and instruction.peers != cascade.ranks:
                ranks = rank_list(cascade.ranks)
                yield Mistake(
                    instruction.span,
                    f"rank {program.rank} runs `{written(instruction)}`, and %{cascade.name} is placed on {ranks}",
                    kind="wrong segment group",
                    label="not the cascade's ranks",
                    help=f"write `on {ranks}`, or place the cascade there",
                )
    sampled = [own for own in values.module.cascades if own.phase in ops] if values.module.programs else []
    wanted = dict.fromkeys((own.name, rank) for own in sampled for rank in own.ranks)
    for key in dict.fromkeys((*wanted, *counts)):
        name, rank = key
        cascade, count, right = values.cascades[name], counts[key], int(key in wanted)
        if count != right:
            op, ranks = ops[cascade.phase], rank_list(cascade.ranks)
            yield Mistake(
                spans.get(key, cascade.span),
                f"rank {rank} runs `{op} %{name}` {count} times instead of {right}",
                kind="wrong segment runs",
                label=f"its ranks are {ranks}",
                help="every rank of a cascade runs it exactly once, as that group, and no other rank does",
            )
