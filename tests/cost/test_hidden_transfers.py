"""What copies and gathers add to a cascade, held against a walk from layer to layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.gathering import Gathering
from arachnec.cost.host_memory import HostTransfers
from arachnec.cost.profile import GATHER, OVERLAPPED, SCATTER
from arachnec.ir.nodes import Cascade, Cluster, Phase, Stage
from arachnec.ir.values import Attributes, Quantity, Value

POD = parse_cluster("2x8:h100-80g")
PCIE, INTRA, LATENCY_MS = 20.0, 450.0, 0.010  # GB/s, GB/s, ms
BLOCK, TRAINED, OUTSIDE, OUTSIDE_TRAINED = 3e8, 2e8, 1.5e8, 1e8
WHOLE, GRADIENT = 2, 4  # bytes of a bf16 parameter, and of its fp32 gradient
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT, Phase.TRAIN)


def cluster(**attrs: Value) -> Cluster:
    fixed = {"pcie": Quantity(PCIE, "GB/s"), "intra": Quantity(INTRA, "GB/s"), "latency": Quantity(10.0, "us")}
    return replace(POD, attrs=POD.attrs.updated(**{**fixed, **attrs}))


def stage(blocks: int, cell: int | None, host: bool) -> Stage:
    attrs = Attributes.of(
        params=round(blocks * BLOCK + OUTSIDE),
        trained=round(blocks * TRAINED + OUTSIDE_TRAINED),
        layers=tuple((f"blocks.{number}", round(TRAINED)) for number in range(blocks)),
        layer_params=(round(BLOCK),) * blocks,
        dtype="bf16",
        gradients="f32",
        cell=cell,
        host=("optimizer", "parameters", "inputs") if host else None,
    )
    return Stage("dit", True, attrs)


@dataclass(frozen=True)
class Walk:
    """A pass over the blocks in lockstep: before the first one nothing computes, behind the last one neither."""

    blocks: int
    compute: float  # ms of a block

    def shown(self, before: float, beside: float, after: float) -> float:
        """ms beyond computing, where ``beside`` is what every block but the last is accompanied by."""
        now = before
        for block in range(self.blocks):
            now += self.compute if block == self.blocks - 1 else max(self.compute, beside)
        return now + after - self.blocks * self.compute


def collective(size: float, cell: int, speed: float = INTRA) -> float:
    """ms: each rank passes on all parts but its own, in as many steps as doublings."""
    return size * (cell - 1) / cell / (speed * 1e6) + math.ceil(math.log2(cell)) * LATENCY_MS


@dataclass(frozen=True)
class Layers:
    """ms of every copy and collective of a stage, from its parameters alone."""

    cell: int
    gathers: bool = True
    brings: bool = True
    copied: float = PCIE / 2  # GB/s: two devices share a switch
    sent: float = INTRA  # GB/s

    def gather(self, parameters: float) -> float:
        return collective(parameters * WHOLE, self.cell, self.sent) if self.gathers and self.cell > 1 else 0.0

    def scatter(self, parameters: float) -> float:
        return collective(parameters * GRADIENT, self.cell, self.sent) if self.gathers and self.cell > 1 else 0.0

    def brought(self, parameters: float) -> float:
        return parameters * WHOLE / self.cell / (self.copied * 1e6) if self.brings else 0.0

    def taken(self, parameters: float) -> float:
        return parameters * GRADIENT / self.cell / (self.copied * 1e6) if self.brings else 0.0


def expected(layers: Layers, phase: Phase, split: bool, walks: tuple[Walk, Walk], inputs: float) -> float:
    """ms that a cascade's pass or passes take longer. ``inputs``: ms of one block's, each way."""
    ahead, back = walks
    total = 0.0
    last = layers.brought(OUTSIDE) + layers.gather(OUTSIDE)
    if phase in (Phase.FORWARD, Phase.TRAIN):
        comes, whole = layers.brought(BLOCK), layers.gather(BLOCK)
        total += ahead.shown(last + comes + whole, max(comes, inputs, whole), 0.0)
    if phase is Phase.FORWARD:
        return total
    activation, weight = phase is not Phase.WEIGHT, phase is Phase.WEIGHT or not split
    comes = layers.brought(BLOCK) + inputs if activation else 0.0
    whole = layers.gather(BLOCK) if activation else 0.0
    goes = layers.taken(TRAINED) if weight else 0.0
    summed = layers.scatter(TRAINED) if weight else 0.0
    before = comes + whole + (last if phase is Phase.BACKWARD else 0.0)  # behind a forward the last layer stays
    after = goes + summed + (layers.scatter(OUTSIDE_TRAINED) + layers.taken(OUTSIDE_TRAINED) if weight else 0.0)
    # the gradient so far comes beside the parameters, and goes back with what was added
    return total + back.shown(before, max(comes + goes, whole + summed), after)


CASES = st.tuples(
    st.integers(1, 5), st.sampled_from([None, 2, 8]), st.sampled_from(PHASES), st.booleans(), st.floats(0.0, 200.0),
    st.floats(0.0, 200.0), st.floats(0.0, 3.0),
)  # fmt: skip


@given(CASES, st.sampled_from([INTRA, 5.0]))
@settings(max_examples=300, deadline=None)
def test_layers_in_the_host_show_what_a_walk_through_them_finds(
    case: tuple[int, int | None, Phase, bool, float, float, float], speed: float
) -> None:
    """Copies or collectives are the slower ones."""
    blocks, cell, phase, split, forward, backward, inputs = case
    cascade = Cascade("c", phase, "dit", (0,), 1, 1000, 0)
    stages, names = {"dit": stage(blocks, cell, host=True)}, frozenset({"c"} if split else ())
    pod = cluster(intra=Quantity(speed, "GB/s"))
    transfers = HostTransfers(stages, pod, Gathering(stages, pod, names))
    walks = Walk(blocks, forward), Walk(blocks, backward)
    block_ms = inputs * 2**30 / (PCIE / 2 * 1e6) / blocks
    right = expected(Layers(cell or 1, sent=speed), phase, split, walks, block_ms)
    assert transfers.exposed(cascade, forward * blocks, backward * blocks, inputs) == pytest.approx(right)


@given(CASES)
@settings(max_examples=150, deadline=None)
def test_cells_whose_parameters_are_on_the_devices_show_what_a_walk_finds(
    case: tuple[int, int | None, Phase, bool, float, float, float],
) -> None:
    blocks, cell, phase, split, forward, backward, _ = case
    forward, backward = forward / 50, backward / 50  # of the size of a gather
    cascade = Cascade("c", phase, "dit", (0,), 1, 1000, 0)
    stages, names = {"dit": stage(blocks, cell, host=False)}, frozenset({"c"} if split else ())
    gathering = Gathering(stages, cluster(), names)
    transfers = HostTransfers(stages, cluster(), gathering)
    walks = Walk(blocks, forward), Walk(blocks, backward)
    right = expected(Layers(cell or 1, brings=False), phase, split, walks, 0.0)
    times = forward * blocks, backward * blocks
    assert gathering.exposed(cascade, *times) == pytest.approx(right)
    assert transfers.exposed(cascade, *times, 0.0) == gathering.exposed(cascade, *times)


@given(CASES, st.floats(1.0, 20.0))
@settings(max_examples=60, deadline=None)
def test_cores_that_gather_show_what_was_measured_beside_compute_at_least(
    case: tuple[int, int | None, Phase, bool, float, float, float], faster: float
) -> None:
    """One latency for plain collectives and none for what compute beside them takes longer."""
    blocks, _, phase, split, forward, backward, _ = case
    rows = [(op, Quantity(10.0, "us"), Quantity(INTRA, "GB/s")) for op in (GATHER, SCATTER)]
    rows += [(OVERLAPPED[row[0]], Quantity(0.0, "us"), Quantity(INTRA * faster, "GB/s")) for row in rows]
    pod = parse_cluster("4:cpu")
    measured = replace(pod, attrs=pod.attrs.updated(collectives=tuple(rows)))
    stages, names = {"dit": stage(blocks, 2, host=False)}, frozenset({"c"} if split else ())
    exposed = Gathering(stages, measured, names).exposed(Cascade("c", phase, "dit", (0,), 1, 9, 0), forward, backward)
    layers = Layers(2, brings=False)
    gather, scatter = (collective(size, 2) - LATENCY_MS for size in (BLOCK * WHOLE, TRAINED * GRADIENT))
    gathers, scatters = phase is not Phase.WEIGHT, phase is Phase.WEIGHT or (phase is not Phase.FORWARD and not split)
    right = 0.0
    if phase in (Phase.FORWARD, Phase.TRAIN):
        shown = max(gather / faster, layers.gather(BLOCK) - forward / blocks)
        right += layers.gather(OUTSIDE) + layers.gather(BLOCK) + (blocks - 1) * shown
    if phase is not Phase.FORWARD:
        least = (gathers * gather + scatters * scatter) / faster
        moved = gathers * layers.gather(BLOCK) + scatters * layers.scatter(TRAINED)
        right += layers.gather(OUTSIDE) if phase is Phase.BACKWARD else 0.0
        right += moved + (blocks - 1) * max(least, moved - backward / blocks)
        right += layers.scatter(OUTSIDE_TRAINED) if scatters else 0.0
    assert exposed == pytest.approx(right)
