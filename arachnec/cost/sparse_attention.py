"""What attention over chosen keys takes beside attention over all: shares of the stage's pairs of tokens.

Of a sparse layer the terms in S^2 are split by head and scaled by its density. The terms in S*T stay: captions are
always kept, and their own queries are dense. Prediction and choice are work of their own, once: a recomputed forward
and the backward use the lists of the first forward. So is what its predictor learns, as its share of a
step. A layer waits for the rank that has most of its heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from arachnec.ir.head_density import (
    HeadPart,
    LayerDensity,
    group_count,
    latest_densities,
    layer_densities,
    length_class,
    measured_densities,
    parts_by_layer,
    sparse_layers,
)
from arachnec.ir.nodes import Cascade, Clip, Phase, Stage, integer, quantity
from arachnec.ir.stage_sizes import count_in, formula_in, squared
from arachnec.sparsity.clip_grid import caption_blocks, clip_cubes
from arachnec.sparsity.head_shares import (
    DENSE_EVERY,
    SPARSE_EVERY,
    Division,
    Share,
    balanced,
    heads_by_number,
    imbalance,
    keys_sent,
    longest_first,
    share_inside,
)

ATTENDS = (Phase.TRAIN, Phase.FORWARD, Phase.BACKWARD, Phase.DENOISE)
NO_SPEEDS = (1.0, 1.0, 1.0)
WORTH = 0.98  # a layer is sparse where it takes less than this of the dense time: never slower by rounding


@dataclass(frozen=True)
class SparseLoad:
    """Of all sparse layers of a cascade on the ranks of one clip; shares are of the whole, on the heaviest rank."""

    pairs: float  # of the stage's pairs of tokens, those that sparse layers would compute densely, all ranks
    forward: float  # of the stage's pairs of tokens, as time of dense kernels
    backward: float
    choice: float  # layers, each counted by its heaviest rank
    received: float  # attentions' traffic: layers, each counted by the rank that gets most
    layers: int
    learning: float = 0.0  # layers whose predictors learn, sparse by now or not, each by its heaviest rank
    learners: float = 0.0  # layers whose predictors learn: one counts by the share of the steps in which it does


NO_LOAD = SparseLoad(0.0, 0.0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class SparseLoads:
    """The loads of these stages' sparse layers, each computed once. ``node``: ranks of one of several machines, 0 where
    there is one."""

    stages: Mapping[str, Stage]
    node: int = 0
    _densities: dict[str, Mapping[int, LayerDensity]] = field(default_factory=dict, repr=False, compare=False)
    _loads: dict[tuple[object, ...], SparseLoad] = field(default_factory=dict, repr=False, compare=False)
    _faster: dict[tuple[str, int, int], frozenset[int]] = field(default_factory=dict, repr=False, compare=False)

    def of(self, cascade: Cascade, degree: int) -> SparseLoad:
        """Of a clip of the cascade on ``degree`` ranks: as its ``heads`` say, or as they would be divided."""
        if "sparse" not in cascade.attrs:
            return NO_LOAD
        layers = self._running(cascade)
        dense = len(sparse_layers(cascade)) - len(layers)  # they learn until they turn sparse
        return _learning_too(self._of_layers(cascade, degree, layers), degree, dense)

    def _apart(self, name: str) -> int:
        """Ranks of a machine, where ranks of another get only chosen keys; 0 where all keys travel: of stages of a
        cut model, and of models that sample."""
        stage = self.stages[name]
        return self.node if stage.trained and "part_of" not in stage.attrs else 0

    def _of_layers(self, cascade: Cascade, degree: int, layers: tuple[int, ...]) -> SparseLoad:
        if not layers:
            return NO_LOAD
        heads = cascade.attrs.get("heads") if cascade.attrs.get("degree") == degree else None
        groups = coarse_groups(group_count(self.stages[cascade.stage], cascade.tokens))
        length = length_class(cascade.tokens)
        key = cascade.stage, layers, length, groups, degree, heads
        load = self._loads.get(key)
        if load is None:
            given = {} if heads is None else given_divisions(cascade)
            groups = groups if heads is None else integer(cascade.attrs["groups"])
            table = {layer: self.densities(cascade.stage)[layer].at(length) for layer in layers}
            load = self._loads[key] = self._load(cascade.stage, table, groups, degree, given)
        return load

    def _load(
        self, name: str, table: Mapping[int, LayerDensity], groups: int, degree: int, given: Mapping[int, Division]
    ) -> SparseLoad:
        stage = self.stages[name]
        ahead, back, _ = speeds(stage)
        pairs, dense, choice, received = 0.0, 0.0, 0.0, 0.0
        inside = share_inside(degree, self._apart(name) or degree)
        for layer, density in table.items():
            weights = head_weights(stage, density)
            division = given.get(layer) or divided(stage, density, groups, degree)
            heaviest = imbalance(division, weights, groups) / degree
            pairs += density.share
            dense += density.share * density.mean * heaviest
            choice += heaviest
            received += most_received(division, density.heads, groups, inside)
        return SparseLoad(pairs, dense / ahead, dense / back, choice, received, len(table))

    def _running(self, cascade: Cascade) -> tuple[int, ...]:
        """The layers of those that may be sparse which are, as far as a run has told."""
        layers, stage = sparse_layers(cascade), self.stages[cascade.stage]
        measured = measured_densities(stage) if layers else None
        if measured is None:
            return layers
        key = cascade.stage, cascade.tokens, cascade.text
        if key not in self._faster:
            self._faster[key] = frozenset(faster_sparse(stage, cascade.tokens, cascade.text, measured))
        return tuple(layer for layer in layers if layer in self._faster[key])

    def densities(self, stage: str) -> Mapping[int, LayerDensity]:
        table = self._densities.get(stage)
        if table is None:
            table = self._densities[stage] = latest_densities(self.stages[stage])
        return table


def _learning_too(load: SparseLoad, degree: int, dense: int) -> SparseLoad:
    """With the layers that learn in a step behind the first ones, on the average, so many dense ones among them."""
    learning = load.choice / SPARSE_EVERY + dense / DENSE_EVERY / degree
    return replace(load, learning=learning, learners=load.layers / SPARSE_EVERY + dense / DENSE_EVERY)


def given_divisions(cascade: Cascade) -> Mapping[int, Division]:
    """For every sparse layer what the cascade's ``heads`` give to each rank of a clip."""

    def at(parts: tuple[HeadPart, ...], place: int) -> tuple[Share, ...]:
        return tuple(Share(part.head, part.start, part.stop) for part in parts if part.place == place)

    layers = parts_by_layer(cascade)
    return {layer: tuple(at(parts, place) for place in range(cascade.degree)) for layer, parts in layers.items()}


def divided(stage: Stage, density: LayerDensity, groups: int, degree: int) -> Division:
    """The heads of a layer over the ranks of a clip, as the stage's ``division`` says."""
    weights = head_weights(stage, density)
    if stage.attrs.get("division") == "heads":
        return longest_first(weights, groups, degree)
    return balanced(weights, groups, degree)


def head_weights(stage: Stage, density: LayerDensity) -> tuple[float, ...]:
    """The work of each head, forward and backward, prediction and choice: in units of its dense forward.

    The choice counts by its part in S^2. That part and a dense head grow alike, so the weights, and with them the
    division, are those of all lengths.
    """
    ahead, back, choosing = speeds(stage)
    again = 2.0 if stage.trained else 0.0  # a dense backward over its forward, in FLOPs
    choice, whole = squared(formula_in(stage, "choice")), squared(formula_in(stage, "flops")) * density.share
    extra = choice / whole / choosing if whole else 0.0
    return tuple(head * (1 / ahead + again / back) + extra for head in density.heads)


def most_received(division: Division, densities: tuple[float, ...], groups: int, inside: float = 1.0) -> float:
    """Of a layer's queries, keys, values and output, the share that the rank with most of them gets or makes, where
    ``inside`` of the other ranks are on its machine."""
    heads = len(densities)
    shares = []
    for own in division:
        queries = math.fsum(share.groups / groups for share in own)
        keys = math.fsum(keys_sent(densities[share.head], share.groups, inside) for share in own)
        shares.append((queries + keys) / (2 * heads))
    return max(shares)


def speeds(stage: Stage) -> tuple[float, float, float]:
    """Sparse kernels over dense ones, in FLOPs a second: forward, backward, and prediction and choice."""
    values = stage.attrs.get("sparse_speed", NO_SPEEDS)
    assert isinstance(values, tuple)
    ahead, back, choosing = (value for value in values if isinstance(value, int | float))
    return float(ahead), float(back), float(choosing)


def coarse_groups(groups: int) -> int:
    """A power of two, so that lengths share their divisions: for costs alone, by a little too uneven."""
    return 1 << (groups.bit_length() - 1)


def faster_sparse(
    stage: Stage, tokens: int, text: int, densities: Mapping[int, LayerDensity] | None = None
) -> tuple[int, ...]:
    """The layers that take less time sparse than dense, for clips of this length: on one rank, one clip, forward and
    backward. So the answer is the same in every plan. Without ``densities`` by those that the stage assumes, and with
    what is learned meanwhile: a layer that is not to be sparse learns nothing, and one that may be does on either
    path."""
    table = layer_densities(stage) if densities is None else densities
    forward, backward = (squared(formula_in(stage, name)) * tokens**2 for name in ("forward", "backward"))
    ahead, back, _ = speeds(stage)
    choosing = choice_time(stage, tokens, text) + choice_overhead(stage)
    if densities is None:
        choosing += (learning_time(stage, tokens, text) + learning_overhead(stage)) / SPARSE_EVERY
    return tuple(
        layer
        for layer, density in ((layer, known.at(tokens)) for layer, known in table.items())
        if density.share * density.mean * (forward / ahead + backward / back) + choosing
        < WORTH * density.share * (forward + backward)
    )


def with_sparse_layers(cascades: Iterable[Cascade], stages: Iterable[Stage]) -> tuple[Cascade, ...]:
    """The cascades, each with the layers that it runs ``sparse``. One that is scheduled keeps what it says."""
    densities = {stage.name: stage for stage in stages if "density" in stage.attrs}
    lengths: dict[tuple[str, int, int], tuple[int, ...]] = {}
    chosen = []
    for cascade in cascades:
        if cascade.stage not in densities or cascade.phase not in ATTENDS or "degree" in cascade.attrs:
            chosen.append(cascade)
            continue
        key = cascade.stage, cascade.tokens, cascade.text
        if key not in lengths:
            lengths[key] = faster_sparse(densities[cascade.stage], cascade.tokens, cascade.text)
        chosen.append(cascade.with_attrs(sparse=lengths[key] or None))
    return tuple(chosen)


def choice_time(stage: Stage, tokens: int, text: int) -> float:
    """ms of prediction and choice of one sparse layer, one clip, one rank, by what a FLOP of attention takes."""
    choice, flops = formula_in(stage, "choice"), squared(formula_in(stage, "flops"))
    if choice is None or not flops:
        return 0.0
    rate = squared(formula_in(stage, "forward")) / flops
    return choice(B=1, S=tokens, T=text) * rate / speeds(stage)[2]


def choice_overhead(stage: Stage) -> float:
    """ms that prediction and choice of one sparse layer take for any clips: launches."""
    value = stage.attrs.get("choice_overhead")
    return 0.0 if value is None else quantity(value)


def learning_time(stage: Stage, tokens: int, text: int) -> float:
    """ms in which the predictor of one layer learns and is measured by one clip on one rank, but for launches."""
    learning, flops = formula_in(stage, "learning"), squared(formula_in(stage, "flops"))
    if learning is None or not flops:
        return 0.0
    return learning(B=1, S=tokens, T=text) * squared(formula_in(stage, "forward")) / flops


def learning_overhead(stage: Stage) -> float:
    """The same for any clip: launches."""
    value = stage.attrs.get("learning_overhead")
    return 0.0 if value is None else quantity(value)


GIB = 2**30
ENTRY = 4  # bytes of a key block's number in a list, and of a list's length


def lists_gib(stage: Stage, cascade: Cascade, ranks: int, clip: Clip | None = None) -> float:
    """GiB of a cascade's lists on any of the ``ranks`` of a clip; kept from the forward to the end of the backward.
    Without a ``clip`` its tokens stand in one row.

    What a run that trains measures is not known: it counts all blocks in every list. Heads are counted as they are
    where they go by number; a run divides them otherwise only where that keeps to it (``list_room``). Of a model that
    samples densities stay as they are, and heads are divided as evenly as they can be.
    """
    layers = sparse_layers(cascade)
    if not layers or not count_in(stage, "query_group") or not count_in(stage, "key_block"):
        return 0.0
    groups, blocks = clip_cubes(stage, cascade.tokens, clip)
    captions, table, entries = caption_blocks(stage, cascade.text), latest_densities(stage), 0.0
    for layer in layers:
        densities = table[layer].at(cascade.tokens).heads
        kept = [blocks if stage.trained else min(blocks, math.ceil(density * blocks)) for density in densities]
        listed = sum(kept) + len(kept) * (captions + 1)  # with the length of each list
        entries += groups * listed * heads_by_number(len(kept), ranks) / len(kept)
    return cascade.batch * entries * ENTRY / GIB
