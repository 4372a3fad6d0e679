"""Why a plan is as it is, in sentences. Every number in them is the plan's own or comes from its cost model.

``summary`` is cheap and stands on the page too; ``explain`` asks the cost model what other degrees, more memory or free
links would come to. What replanning would make of a change is ``arachnec.views.what_if``.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arachnec.analysis.uses import READS_GRADIENTS
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.diagnostic import counted
from arachnec.ir.limits import MOST_CASCADES, MOST_LINKS
from arachnec.ir.nodes import Cascade, Module, Phase, quantity
from arachnec.ir.sampling import is_sampling, objective_ms, objective_of
from arachnec.ir.stage_sizes import times_of
from arachnec.planning.lower_bounds import BoundParts, bound_parts
from arachnec.views.critical_path import Link, critical_path
from arachnec.views.explain_pipeline import pipeline_sentences
from arachnec.views.format import clip_names, ms, names_of, ranges, size_of
from arachnec.views.host_memory import host_sentences
from arachnec.views.sparse_attention import sparse_sentences
from arachnec.views.timeline import COMPUTE, Timeline, planned

NOTHING = 5e-4  # relative: what is less is not worth a word


@dataclass(frozen=True)
class Section:
    """Sentences under a heading."""

    title: str
    sentences: tuple[str, ...]


def summary(module: Module, timeline: Timeline) -> tuple[Section, ...]:
    """What the plan comes to, and where ranks idle; ``timeline`` is the module's plan."""
    return (
        Section("The plan", tuple(_plan(module, timeline))),
        Section("Idle time", tuple(_idle(timeline))),
    )


def explain(module: Module) -> tuple[Section, ...]:
    """Why a lowered module's plan is as it is.

    Raises UserError where one of its cascades fits the memory at no degree.
    """
    timeline = planned(module)
    cost = CostModel(module)
    path = critical_path(module, timeline)
    parts = bound_parts(module)
    plan, idle = summary(module, timeline)
    layout, staged = tuple(_layout(module)), pipeline_sentences(module, cost)
    return (
        plan,
        *([Section("Layout", layout)] if layout else []),
        *([Section("The pipeline", tuple(staged))] if staged else []),
        Section("What bounds it", tuple(_bound(module, parts, cost))),
        Section("The critical path", tuple(_critical(module, path))),
        Section("Degrees", tuple(_degrees(module, cost))),
        Section("Recomputation", tuple(_recomputation(module, cost))),
        Section("Communication", tuple(_communication(module, cost))),
        *(Section("Host memory", tuple(host)) for host in [host_sentences(module, cost)] if host),
        *(Section("Sparse attention", tuple(sparse)) for sparse in [sparse_sentences(module)] if sparse),
        idle,
    )


def _plan(module: Module, timeline: Timeline) -> list[str]:
    assert module.cluster is not None
    makespan = _makespan(timeline)
    sentence = (
        f"One iteration of {counted(len(module.clips), 'clip')} on {_devices(module)} takes {ms(timeline.end)}: "
        f"{ms(makespan)} of cascades, {_synchronisation(timeline, makespan)}."
    )
    if is_sampling(module):
        sentence = f"Sampling {counted(len(module.clips), 'request')} on {_devices(module)} takes {ms(makespan)}."
    bound = quantity(module.attrs["bound"])
    if objective_of(module) != "makespan":
        return [sentence, *_latency(module, bound)]
    if module.attrs.get("proved") is True:
        return [sentence, "No plan of these cascades is shorter: that was proved."]
    if bound <= 0:
        return [sentence]
    gap = makespan / bound - 1
    return [
        sentence,
        f"No plan of these cascades ends before {ms(bound)}. This one does {_percent(gap)} later; "
        "how much of that a longer search could save is not known.",
    ]


def _latency(module: Module, bound: float) -> list[str]:
    """Of a plan for a latency: what it is, and what no plan goes below."""
    value = objective_ms(module, {cascade.name: cascade.end for cascade in module.cascades})
    name = {"mean-latency": "mean latency", "p95-latency": "95th percentile of latency"}[objective_of(module)]
    sentence = f"It was made for the {name} of requests, which is {ms(value)}"
    if module.attrs.get("proved") is True:
        return [f"{sentence}. No plan of these cascades has less: that was proved."]
    if bound <= 0:
        return [f"{sentence}."]
    more = _percent(value / bound - 1)
    return [f"{sentence}. No plan of these cascades has less than {ms(bound)}; this one has {more} more."]


def _layout(module: Module) -> list[str]:
    """What the layout was chosen from; nothing where there was no choice."""

    def listed(name: str) -> list[str]:
        value = module.attrs.get(name)
        pairs = value if isinstance(value, tuple) else ()
        return [f"`{pair[0]}` {ms(quantity(pair[1]))}" for pair in pairs if isinstance(pair, tuple)]

    simulated, excluded, refused = listed("tried"), listed("excluded"), module.attrs.get("refused")
    if not simulated:
        return []
    chosen = module.attrs["layout"]
    sentences = [f"Its layout is `{chosen}`, the shortest on a sample of the run, simulated: {_listed(simulated)}."]
    if excluded:
        sentences.append(f"Not simulated, as they take longer at least: {_listed(excluded)}.")
    if isinstance(refused, tuple) and refused:
        sentences.append(f"Some clip does not fit in {_listed([f'`{name}`' for name in refused])}.")
    return sentences


def _synchronisation(timeline: Timeline, makespan: float) -> str:
    """What comes after the last cascade."""
    after = timeline.end - makespan
    if after <= NOTHING * timeline.end:
        return "and next to nothing after them"
    steps = _longest(timeline, READS_GRADIENTS)
    exposed, learning = max(0.0, after - steps), _longest(timeline, ("learn",))
    parts = [f"{ms(steps - learning)} of optimizer"]
    if learning > NOTHING * timeline.end:
        parts.append(f"{ms(learning)} in which ranks add up what sparse layers learn")
    if exposed <= NOTHING * timeline.end:
        return f"then {_listed(parts)}; the gradient all-reduces are hidden behind the last backwards"
    return f"then {_listed([f'{ms(exposed)} of exposed gradient all-reduces', *parts])}"


def _longest(timeline: Timeline, ops: Container[str]) -> float:
    """ms of these on the rank that has most of them."""
    lanes = timeline.lanes.values()
    return max((sum(i.end - i.start for i in lane if i.op in ops) for lane in lanes), default=0.0)


def _idle(timeline: Timeline) -> list[str]:
    makespan = _makespan(timeline)
    if makespan <= 0:
        return []
    lanes = {rank: [i for i in lane if i.op in COMPUTE] for rank, lane in timeline.lanes.items()}
    head = {rank: lane[0].start if lane else makespan for rank, lane in lanes.items()}
    tail = {rank: makespan - max((i.end for i in lane), default=makespan) for rank, lane in lanes.items()}
    idle = {rank: max(0.0, makespan - timeline.busy_ms(rank)) for rank in lanes}
    total = makespan * len(lanes)
    share = math.fsum(idle.values()) / total
    if share <= 0:
        return ["No rank ever waits before the last cascade has ended."]
    if share <= NOTHING:
        return [f"Up to the last cascade's end ranks idle {_percent(share)} of the time."]
    before, after = math.fsum(head.values()) / total, math.fsum(tail.values()) / total
    parts = (
        (before, "before their first cascade"),
        (share - before - after, "between cascades"),
        (after, "after their last"),
    )
    split = _listed([f"{_percent(part)} {when}" for part, when in parts if part > NOTHING / 10])
    sentences = [f"Up to the last cascade's end ranks idle {_percent(share)} of the time: {split}."]
    longest = max(idle.values())
    worst = [rank for rank in idle if idle[rank] >= longest * 0.999]
    if len(worst) < len(lanes):
        sentences.append(f"Most idle {'is' if len(worst) == 1 else 'are'} {_ranks(worst)}, {ms(longest)}.")
    gap, rank, start = max(
        ((b.start - a.end, rank, a.end) for rank, lane in lanes.items() for a, b in pairwise(lane)),
        default=(0.0, 0, 0.0),
    )
    if gap > makespan * 0.005:
        sentences.append(f"The longest wait between cascades is {ms(gap)}, on rank {rank} from {ms(start)} on.")
    return sentences


def _bound(module: Module, parts: BoundParts, cost: CostModel) -> list[str]:
    sentences = [_cause(module, parts)]
    without = (
        (parts.without_memory, "If memory limited nothing", "More memory alone would not lower the bound."),
        (parts.without_precedence, "If no cascade waited for another", ""),
        (parts.without_communication, "If links cost no time", ""),
    )
    for bound, condition, otherwise in without:
        less = 1 - bound / parts.bound if parts.bound > 0 else 0.0
        if less > NOTHING:
            sentences.append(f"{condition}, the bound would be {ms(bound)}, {_percent(less)} less.")
        elif otherwise:
            sentences.append(otherwise)
    if any(cascade.inputs for cascade in module.cascades) and parts.without_precedence >= parts.bound * (1 - NOTHING):
        sentences.append("That cascades wait for others does not raise it.")
    return sentences


def _cause(module: Module, parts: BoundParts) -> str:
    named = {cascade.name: cascade for cascade in module.cascades}
    if parts.cause == "work":
        sentence = f"Work bounds it: at the degrees that cost least it fills {_devices(module)} for {ms(parts.work)}."
        if parts.work < parts.bound * (1 - NOTHING):
            return (
                f"{sentence[:-1]}, and as some cascades need higher ones to end in time, or leave devices idle while "
                f"they wait, no plan ends before {ms(parts.bound)}."
            )
        return f"{sentence} The longest {_chain_words(parts.chain)} at its fastest {ms(parts.longest)}."
    if parts.cause == "chain":
        chain = [named[name] for name in parts.chain]
        if len(chain) == 1:
            return (
                f"One cascade bounds it: {_words(module, chain[0])} takes {ms(parts.longest)} at its fastest. "
                f"All work would fill {_devices(module)} for {ms(parts.work)}."
            )
        listed = ", then ".join(_words(module, cascade) for cascade in chain)
        return (
            f"A chain of cascades bounds it: {listed} take {ms(parts.longest)} at their "
            f"fastest. All work would fill {_devices(module)} for {ms(parts.work)}."
        )
    return (
        f"Cascades that need more than half of the ranks bound it: one after another they end at {ms(parts.bound)} at "
        f"the earliest. All work would fill {_devices(module)} for {ms(parts.work)}."
    )


def _chain_words(chain: Sequence[str]) -> str:
    if len(chain) == 1:
        return f"cascade, %{chain[0]}, takes"
    return f"chain, {', '.join(f'%{name}' for name in chain)}, takes"


def _critical(module: Module, links: Sequence[Link]) -> list[str]:
    """A sentence for each link; of a long path the first and the last ones."""
    waits = math.fsum(link.gap for link in links)
    sentences = []
    if waits > NOTHING * (links[-1].end if links else 0.0):
        sentences.append(f"{counted(len(links), 'link')}, with {ms(waits)} of handoffs and waiting between them.")
    cut = len(links) - MOST_LINKS if len(links) > MOST_LINKS else 0
    for number, link in enumerate(links):
        if cut and number == MOST_LINKS // 2:
            sentences.append(f"... {cut} more ...")
        if not cut or number < MOST_LINKS // 2 or number >= MOST_LINKS // 2 + cut:
            sentences.append(_link(module, link))
    return sentences


def _link(module: Module, link: Link) -> str:
    named = {cascade.name: cascade for cascade in module.cascades}
    cascade = named.get(link.target)
    event = (
        f"{_words(module, cascade)} on {_ranks(link.ranks)}"
        if cascade
        else f"{' and '.join(link.ops)} of @{link.target}"
    )
    event_time = f"{event}, {ms(link.start)} to {ms(link.end)}"
    gap = f", {ms(link.gap)} later" if link.gap > NOTHING * link.end else ""
    if link.because == "start" or link.waited is None:
        return f"{event_time}: the first there is to do."
    waited = f"%{link.waited}" if link.waited in named else f"the {link.waited} stage"
    if link.because == "input":
        return f"{event_time}: it reads what {waited} made{gap}."
    return f"{event_time}: its {'rank was' if len(link.ranks) == 1 else 'last rank was'} in {waited} until then{gap}."


def _degrees(module: Module, cost: CostModel) -> list[str]:
    """Why the longest cascades have their degrees: what the next ones would come to."""
    longest = sorted(module.cascades, key=lambda cascade: (cascade.start - cascade.end, cascade.name))[:MOST_CASCADES]
    makespan = max((cascade.end for cascade in module.cascades), default=0.0)
    return [_degree(cascade, cost, makespan) for cascade in longest]


def _degree(cascade: Cascade, cost: CostModel, makespan: float) -> str:
    legal = cost.legal_degrees(cascade)
    below = [degree for degree in legal if degree < cascade.width]
    above = [degree for degree in legal if degree > cascade.width]
    sentence = f"{_words(cost.module, cascade)} has degree {cascade.width}: {ms(cascade.end - cascade.start)}."
    packed = cost.time(cascade, cascade.width, recompute=cost.recomputed(cascade))
    if packed < (cascade.end - cascade.start) * (1 - 10 * NOTHING):
        elsewhere = "the fastest devices" if cost.devices.kinds else "as few nodes as hold it"
        sentence += f" Where it is placed it takes longer than on {elsewhere}: {ms(packed)}."
    if len(legal) == 1:
        return f"{sentence} No other degree is legal."
    if below:
        sentence += f" {_other_degree(cascade, below[-1], cost, makespan)}"
    elif cascade.width > 1:
        sentence += " No lower degree is legal."
    if above:
        sentence += f" {_other_degree(cascade, above[0], cost, makespan)}"
    else:
        sentence += " No higher degree is legal."
    return sentence


def _other_degree(cascade: Cascade, degree: int, cost: CostModel, makespan: float) -> str:
    """What another degree would have cost; measured against what the cascade takes as it was placed."""
    ranks = _like(cascade, degree, cost)
    entry = cost.table.fitting(cascade, degree, ranks)
    if entry is None:
        blocks = cost.blocks(cascade) if cost.can_recompute(cascade) else 0
        need, room = cost.memory(cascade, degree, blocks), cost.room_on(ranks, degree)
        return f"At {degree} it would not fit: {need:.3g} GiB per rank, where {room:.3g} are free."
    current = cascade.end - cascade.start
    time, recompute, now = entry.time, entry.recompute, cost.recomputed(cascade)
    area = degree * time / (cascade.width * current) - 1 if current > 0 else 0.0
    some = f" {recompute} blocks" if recompute < cost.blocks(cascade) else ""
    with_recompute = f", recomputing{some}," if recompute not in (0, now) else ""
    without = " without recomputing" if now and not recompute else ""
    late = cascade.start + time - makespan
    end = f" and end {ms(late)} after all others" if late > NOTHING * makespan else ""
    more = f"{_percent(abs(area))} {'more' if area > 0 else 'less'}" if abs(area) > NOTHING else "the same"
    return f"At {degree}{with_recompute} it would take {ms(time)}{without}, {more} GPU time{end}."


def _like(cascade: Cascade, degree: int, cost: CostModel) -> tuple[int, ...] | None:
    """Where devices differ, so many ranks like those of the cascade, and then others; else any."""
    if not cost.devices.kinds:
        return None
    alike = [rank for kind in cost.devices.kinds if set(kind) & set(cascade.ranks) for rank in kind]
    rest = [rank for kind in cost.devices.kinds if not set(kind) & set(cascade.ranks) for rank in kind]
    return tuple(sorted([*alike, *rest][:degree]))


def _recomputation(module: Module, cost: CostModel) -> list[str]:
    recomputing = [cascade for cascade in module.cascades if cascade.recomputes]
    if not any(cost.can_recompute(cascade) for cascade in module.cascades):
        return ["No stage can recompute its blocks."]
    if not recomputing:
        return [
            f"No cascade recomputes its blocks in backward: each fits into the {_rooms(cost)} that parameters, "
            "optimizer and a reserve leave of a device."
        ]
    share = sum(_recompute_cost(cascade, cost) for cascade in recomputing)
    work = math.fsum(cascade.width * (cascade.end - cascade.start) for cascade in module.cascades)
    verb = "recomputes" if len(recomputing) == 1 else "recompute"
    sentences = [
        f"{len(recomputing)} of {counted(len(module.cascades), 'cascade')} {verb} blocks in backward, for "
        f"{_percent(share / work)} of all GPU time, to fit the memory."
    ]
    largest = sorted(recomputing, key=lambda cascade: (cascade.start - cascade.end, cascade.name))[:MOST_CASCADES]
    for cascade in largest:
        width, side = cascade.width, cascade.side
        blocks = cost.recomputed(cascade)
        without, recomputed = (cost.memory(cascade, width, recompute, side) for recompute in (0, blocks))
        room = cost.room_on(cascade.ranks, cascade.width)
        wide = next((d for d in cost.options(cascade) if d > cascade.width and cost.memory(cascade, d) <= room), None)
        fits = f"It would fit without from degree {wide} on." if wide else "It fits without at no degree."
        sentences.append(
            f"{_words(module, cascade)} needs {without:.3g} GiB per rank at degree {cascade.width}, {recomputed:.3g} "
            f"with {_blocks(blocks, cost.blocks(cascade))} recomputed; {room:.3g} are free. {fits}"
        )
    return sentences


def _rooms(cost: CostModel) -> str:
    """``42.9 GiB``, or where devices differ ``42.9 to 58 GiB``."""
    rooms = sorted(cost.room_on(kind, 1) for kind in cost.devices.kinds) or [cost.room]
    return " to ".join(dict.fromkeys((f"{rooms[0]:.3g}", f"{rooms[-1]:.3g}"))) + " GiB"


def _blocks(recomputed: int, blocks: int) -> str:
    """``7 of 40 blocks``."""
    return "all blocks" if recomputed == blocks else f"{recomputed} of {blocks} blocks"


def _recompute_cost(cascade: Cascade, cost: CostModel) -> float:
    """GPU ms that a cascade spends on recomputing."""
    if times_of(cascade):
        return 0.0
    blocks = cost.recomputed(cascade)
    recomputed = cost.time(cascade, cascade.width, ranks=cascade.ranks, recompute=blocks, side=cascade.side)
    return cascade.width * (recomputed - cost.time(cascade, cascade.width, ranks=cascade.ranks, side=cascade.side))


def _communication(module: Module, cost: CostModel) -> list[str]:
    """What ranks that share a cascade spend on talking to each other."""
    shared = [cascade for cascade in module.cascades if cascade.width > 1 and cascade.end > cascade.start]
    if not shared:
        return ["No cascade is shared by several ranks."]
    if any(times_of(cascade) for cascade in shared):
        return ["The times of these cascades were measured as a whole: what of them is communication is not known."]
    talking = {cascade.name: _communication_time(cascade, cost) for cascade in shared}
    work = math.fsum(cascade.width * (cascade.end - cascade.start) for cascade in module.cascades)
    total = math.fsum(cascade.width * talking[cascade.name] for cascade in shared)
    sentences = [f"Ranks that share a cascade talk to each other for {_percent(total / work)} of all GPU time."]
    busiest = max(shared, key=lambda cascade: talking[cascade.name] / (cascade.end - cascade.start))
    part = talking[busiest.name] / (busiest.end - busiest.start)
    nodes = len({rank // cost.cluster.gpus for rank in busiest.ranks})
    nodes_text = f", on {nodes} nodes" if nodes > 1 else ""
    sentences.append(f"The largest part has {_words(module, busiest)}: {_percent(part)} of its time{nodes_text}.")
    return sentences


def _communication_time(cascade: Cascade, cost: CostModel) -> float:
    ulysses, ring = cascade.attrs.get("ulysses"), cascade.attrs.get("ring")
    split = Attention(ulysses if isinstance(ulysses, int) else 1, ring if isinstance(ring, int) else 1)
    return cost.communication(cascade, split, cascade.ranks[: cascade.degree], cost.recomputed(cascade))


def _words(module: Module, cascade: Cascade) -> str:
    """``%3 (train @dit, cat, 1 x 32760 tokens)``."""
    clips = cascade.clips
    named = f", {clip_names(names_of(module), clips)}" if clips else ""
    phase = "" if cascade.phase is Phase.TRAIN else f"{cascade.phase.value} "
    size = f", {size_of(cascade, module.stage(cascade.stage))} tokens" if cascade.tokens else ""
    return f"%{cascade.name} ({phase}@{cascade.stage}{named}{size})"


def _makespan(timeline: Timeline) -> float:
    return max((i.end for i in timeline.intervals if i.op in COMPUTE), default=0.0)


def _devices(module: Module) -> str:
    assert module.cluster is not None
    return counted(module.cluster.world, "rank" if module.cluster.attrs.get("device") == "cpu" else "GPU")


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _percent(share: float) -> str:
    """``3.1 %``, ``0.04 %``."""
    percent = 100 * share
    return f"{percent:.1f} %" if percent >= 0.1 or percent == 0 else f"{percent:.2g} %"
