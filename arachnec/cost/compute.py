"""How long the ranks of a cascade compute: its stage's formulas, divided over them.

Terms without S (launch overhead, what every rank does in full for the caption) are not divided, terms linear in S wait
for the rank with the most tokens, terms in S^2 and S*T for the rank with the most heads, or in layers that attend to
chosen keys for the rank that has most of these (``arachnec.cost.sparse_attention``). An encoder's ranks deal out
whole clips and wait for the one with the most, which takes the formula's time for so many, or so many times the
cascade's ``per_clip``, where that was measured. More ranks than clips divide one clip after the other, all but the
``undivided`` part; so do ranks that each have a part of its weights.

``saved`` is kept for the backward where no block is recomputed, ``saved_recompute`` where all are, one whole block
included: the one that runs again. In between memory falls by what the blocks save, scaled to these two. Time grows with
the number of blocks, from no further forward to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from arachnec.cost.sparse_attention import SparseLoads, choice_overhead, choice_time, learning_overhead, learning_time
from arachnec.cost.strategy import Attention
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.nodes import Cascade, Phase, Stage
from arachnec.ir.sampling import CODING, as_forward, planned_steps
from arachnec.ir.stage_sizes import (
    block_count,
    clip_time,
    count_in,
    formula_in,
    saved_by_recomputing,
    shards_of,
    term_value,
    uneven,
)
from arachnec.ir.tensor_parallel import tensor_parallel
from arachnec.ir.values import Formula

Runs = Sequence[tuple[int, float]]  # so many blocks, and what recomputing each of them saves


def runs_of(stage: Stage, size: Callable[[Formula], float]) -> Runs:
    """The stage's runs of blocks, by what their formulas come to."""
    return [(count, 1.0 if saves is None else size(saves)) for count, saves in saved_by_recomputing(stage)]


def share_recomputed(stage: Stage, blocks: int) -> float:
    """The share of a forward that runs again: blocks count as equally long."""
    return blocks / block_count(stage) if blocks else 0.0


def share_saved(runs: Runs, blocks: int) -> float:
    """The share of what recomputing every block saves that the first ``blocks`` save."""
    total = math.fsum(count * spared for count, spared in runs)
    if total <= 0:
        return 0.0
    kept, left = [], blocks
    for count, spared in runs:
        again = min(count, left)
        kept.append((count - again) * spared)
        left -= again
    return 1 - math.fsum(kept) / total


# Forwards and backwards of its stage in which the ranks of a cascade meet. A weight gradient needs no other rank.
PASSES = {
    Phase.ENCODE: (1.0, 0.0),
    Phase.DECODE: (1.0, 0.0),
    Phase.FORWARD: (1.0, 0.0),
    Phase.DENOISE: (1.0, 0.0),  # of each step
    Phase.BACKWARD: (0.0, 1.0),
    Phase.WEIGHT: (0.0, 0.0),
    Phase.TRAIN: (1.0, 1.0),
}


def passes_of(cascade: Cascade, stage: Stage, recompute: int) -> tuple[float, float]:
    """How many forwards and backwards of its stage a cascade runs; recomputing repeats a part of the forward in the
    backward."""
    forward, backward = PASSES[cascade.phase]
    if cascade.phase is Phase.DENOISE:
        return forward * planned_steps(cascade), backward
    return forward + share_recomputed(stage, recompute) if backward else forward, backward


@dataclass(frozen=True)
class Sizes:
    """ms on one rank, by what divides them."""

    fixed: float  # no size and no degree changes it
    caption: float  # every rank computes it in full
    linear: float  # tokens divide it
    pairwise: float  # pairs of tokens divide it
    square: float  # the part of that for pairs of video tokens

    def part(self, products: float, pairwise: float) -> Sizes:
        """So much of the products with parameters, and so much of what pairs of tokens take."""
        return Sizes(
            self.fixed * products,
            self.caption * products,
            self.linear * products,
            self.pairwise * pairwise,
            self.square * pairwise,
        )


# Of a split backward. A product with a parameter has two gradients that cost the same, one of them the parameter's.
# Attention has no parameters.
WEIGHT_PART = (0.5, 0.0)
ACTIVATION_PART = (0.5, 1.0)


@dataclass(frozen=True)
class Share:
    """What of a clip one of its ranks computes."""

    tokens: float  # of all tokens
    queries: float  # of the queries, with its heads: those of the tokens of its Ulysses group


@dataclass(frozen=True)
class Load:
    """What a rank has of a clip, by default an even share, and how many times as long as the fastest device it takes:
    for what it computes, and where a run found it ``slowed`` also to launch it."""

    slowdown: float = 1.0
    slowed: float = 1.0
    share: Share | None = None


def shares(cascade: Cascade, attention: Attention) -> list[Share] | None:
    """Of every rank, in their order; None where tokens are split evenly."""
    ulysses = attention.ulysses
    shards = shards_of(cascade, ulysses * attention.ring)
    if shards is None:
        return None
    groups = [sum(shards[first : first + ulysses]) for first in range(0, len(shards), ulysses)]
    return [
        Share(tokens / cascade.tokens, groups[rank // ulysses] / cascade.tokens) for rank, tokens in enumerate(shards)
    ]


@dataclass(frozen=True)
class Compute:
    """Compute times in ms of cascades of these stages."""

    stages: Mapping[str, Stage]
    split: Set[str]  # cascades of phase backward whose weight gradients are another cascade
    sparse: SparseLoads
    _sizes: dict[tuple[object, ...], Sizes] = field(default_factory=dict, repr=False, compare=False)

    def time(
        self, cascade: Cascade, degree: int, attention: Attention, recompute: int, slowdown: float, slowed: float = 1.0
    ) -> float:
        """ms on ``degree`` ranks, the slowest of which takes ``slowdown`` times as long as the fastest device.

        Launching takes as long on a slow kind of device, and ``slowed`` times as long on a rank that a run found slow.
        """
        return math.fsum(self.halves(cascade, degree, attention, recompute, (Load(slowdown, slowed),)))

    def halves(
        self, cascade: Cascade, degree: int, attention: Attention, recompute: int, loads: Collection[Load]
    ) -> tuple[float, float]:
        """The ms of ``time`` until the forward has ended, and those of the backward, which recomputes.

        ``loads`` are those of its ranks. They meet before and behind every attention, so its products with parameters
        take as long as on the slowest of them, and its attentions as long as on the slowest at these.
        """
        forward, backward = passes_of(cascade, self.stages[cascade.stage], recompute)
        backs = 1.0 if cascade.phase is Phase.WEIGHT else backward

        def passes(name: str, times: float) -> float:
            return times * self._one_pass(cascade, name, degree, attention, loads) if times else 0.0

        slowdown = max(load.slowdown for load in loads)

        first = 0.0 if cascade.phase is Phase.BACKWARD else min(1.0, forward)
        times = forward if cascade.phase is Phase.DENOISE else first  # every step of sampling has keys of its own
        chosen = self._choice(as_forward(cascade), degree) * slowdown * times
        learned = self._learning(as_forward(cascade), degree) * slowdown * first
        ahead, again = passes("forward", first), passes("forward", forward - first)
        return ahead + chosen + learned, again + passes("backward", backs)

    def _one_pass(
        self,
        cascade: Cascade,
        name: str,
        degree: int,
        attention: Attention,
        loads: Collection[Load],
    ) -> float:
        slowed = max(load.slowed for load in loads)
        if cascade.phase in CODING:
            stage = self.stages[cascade.stage]
            busiest, clip = on_busiest_rank(cascade, stage, degree), clip_time(cascade)
            turns, part = clips_in_turn(cascade, stage, degree)
            if clip is not None:
                return turns * busiest.batch * clip * part * max(load.slowdown for load in loads)
            sizes, slowdown = self._sizes_of(busiest, name), max(load.slowdown for load in loads)
            return turns * (sizes.fixed * slowed + (sizes.caption + (sizes.linear + sizes.pairwise)) * part * slowdown)
        cascade = as_forward(cascade)
        sizes = self._backward_sizes(cascade) if name == "backward" else self._sizes_of(cascade, name)
        heads = count_in(self.stages[cascade.stage], "heads") or attention.ulysses
        even = Share(uneven(cascade.tokens, degree), 1 / attention.ring)
        chosen = self.sparse.of(cascade, degree)
        sparse = sizes.square * (chosen.backward if name == "backward" else chosen.forward)
        products = attentions = -math.inf
        for load in loads:
            share = load.share or even
            dense = (sizes.pairwise - sizes.square * chosen.pairs) * uneven(heads, attention.ulysses) * share.queries
            products = max(products, (sizes.caption + sizes.linear * share.tokens) * load.slowdown)
            attentions = max(attentions, (dense + sparse) * load.slowdown)
        return sizes.fixed * slowed + products + attentions

    def _choice(self, cascade: Cascade, degree: int) -> float:
        """ms of prediction and choice of the sparse layers, each of which waits for its heaviest rank."""
        if not sparse_layers(cascade):
            return 0.0
        load = self.sparse.of(cascade, degree)
        one = choice_time(self.stages[cascade.stage], cascade.tokens, cascade.text)
        return cascade.batch * one * load.choice + choice_overhead(self.stages[cascade.stage]) * load.layers

    def _learning(self, cascade: Cascade, degree: int) -> float:
        """ms in which the predictors of layers that may be sparse learn and are measured."""
        stage = self.stages[cascade.stage]
        if not stage.trained or not sparse_layers(cascade):
            return 0.0
        load = self.sparse.of(cascade, degree)
        one = learning_time(stage, cascade.tokens, cascade.text)
        return cascade.batch * one * load.learning + learning_overhead(stage) * load.learners

    def _backward_sizes(self, cascade: Cascade) -> Sizes:
        """Of a whole backward, or of one part of a split one: as measured, or half of the products in each."""
        attrs = self.stages[cascade.stage].attrs
        if cascade.phase is Phase.WEIGHT:
            if "weight" in attrs:
                return self._sizes_of(cascade, "weight")
            return self._sizes_of(cascade, "backward").part(*WEIGHT_PART)
        if cascade.name in self.split:
            if "activation" in attrs:
                return self._sizes_of(cascade, "activation")
            return self._sizes_of(cascade, "backward").part(*ACTIVATION_PART)
        return self._sizes_of(cascade, "backward")

    def _sizes_of(self, cascade: Cascade, name: str) -> Sizes:
        key = cascade.stage, name, cascade.batch, cascade.tokens, cascade.text
        sizes = self._sizes.get(key)
        if sizes is None:
            sizes = self._sizes[key] = sizes_of(cascade, self.stages[cascade.stage], name)
        return sizes


def sizes_of(cascade: Cascade, stage: Stage, name: str) -> Sizes:
    """The stage's formula ``name`` for a cascade. Raises ValueError where the stage has none."""
    formula = formula_in(stage, name)
    if formula is None:
        raise ValueError(f"stage {stage.name} has no `{name}` formula; run `annotate` first")
    fixed = caption = linear = pairwise = square = 0.0
    for term in formula.terms:
        value = term_value(term, cascade)
        powers = dict(term.powers)
        if "S" in powers and (powers["S"] >= 2 or "T" in powers):
            pairwise += value
            square += 0.0 if "T" in powers else value
        elif "S" in powers:
            linear += value
        elif "T" in powers:
            caption += value
        else:
            fixed += value
    return Sizes(fixed, caption, linear, pairwise, square)


def clips_in_turn(cascade: Cascade, stage: Stage, degree: int) -> tuple[int, float]:
    """How often an encoder's ranks do what the busiest one does, and the part of a clip's time that each then takes."""
    if not is_divided(cascade, stage, degree):
        return 1, 1.0
    undivided = stage.attrs.get("undivided", 0.0)
    assert isinstance(undivided, int | float)
    return cascade.batch, undivided + (1 - undivided) / degree


def is_divided(cascade: Cascade, stage: Stage, degree: int) -> bool:
    """Whether ranks have to share an encoder's clips: there are more than clips, and it can be divided; or each has a
    part of its weights."""
    shared = degree > cascade.batch and count_in(stage, "divides") > 1
    return cascade.phase in CODING and (shared or tensor_parallel(stage) > 1)


def on_busiest_rank(cascade: Cascade, stage: Stage, degree: int) -> Cascade:
    """What the busiest of an encoder's ranks does at once: whole clips are dealt out, or all share one."""
    return replace(cascade, batch=1 if is_divided(cascade, stage, degree) else math.ceil(cascade.batch / degree))
