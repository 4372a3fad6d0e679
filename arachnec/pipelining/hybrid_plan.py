"""DAPPLE's plans: runs of layers on groups of devices, each group sharing every micro-batch; and their latency.

Fan et al., 2007.01045, sections 3 and 5, with the constants of the published planner. Replicas of a stage split each
micro-batch, and all-reduce their gradients at the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise, product
from math import inf

from arachnec.ir.diagnostic import user_error
from arachnec.pipelining.profile_file import LayerProfile

Allocation = tuple[int, ...]  # devices of every machine


@dataclass(frozen=True)
class Machines:
    """Equal machines; bandwidths in bytes per second, the published planner's by default.

    ``send``: of a transfer between stages on different machines; ``reduce``: of an all-reduce that spans machines;
    ``inside``: of one device in its machine, for both.
    """

    count: int
    devices: int
    send: float = 1e9
    reduce: float = 3e9
    inside: float = 25e9


@dataclass(frozen=True)
class Stage:
    """Layers ``first`` to ``last`` - 1, on so many devices of every machine."""

    first: int
    last: int
    devices: Allocation

    @property
    def replicas(self) -> int:
        return sum(self.devices)


@dataclass(frozen=True)
class HybridPlan:
    """``pipelines`` copies of the stages, which say the devices of one; ``apart``: each on machines of its own.

    Times in ms.
    """

    stages: tuple[Stage, ...]
    pipelines: int
    apart: bool
    micro_batches: int
    block: float
    latency: float
    speed_up: float

    def __str__(self) -> str:
        parts = (f"{stage.first}..{stage.last - 1} x {stage.replicas}" for stage in self.stages)
        return f"{self.pipelines} of [{' | '.join(parts)}]"


@dataclass(frozen=True)
class Instance:
    """A profile at a global batch, on machines: what every planner of this room is given.

    ``batch`` clips a step, ``micro_batch`` clips at a time, ``profile_batch`` clips in the profile's times and sizes.
    ``needs`` is the memory of every layer's state and one micro-batch, of which a device has ``room``; without it
    everything fits. UserError where micro-batches do not divide the batch, or there is no device.
    """

    profile: LayerProfile
    machines: Machines
    batch: int
    micro_batch: int
    profile_batch: int
    needs: tuple[float, ...] = ()
    room: float = inf

    def __post_init__(self) -> None:
        if self.machines.count < 1 or self.machines.devices < 1:
            raise user_error(
                f"a plan for {self.machines.count} machines of {self.machines.devices} devices",
                help="give at least one machine with at least one device",
            )
        if min(self.batch, self.micro_batch, self.profile_batch) < 1 or self.batch % self.micro_batch:
            raise user_error(
                f"a global batch of {self.batch} has no whole number of micro-batches of {self.micro_batch}",
                help=f"give a global batch that is a multiple of {self.micro_batch}",
            )

    @cached_property
    def until(self) -> tuple[float, ...]:
        """ms of the layers before each layer, and of all, for the whole global batch on one device."""
        scale = self.batch / self.profile_batch
        return (0.0, *accumulate(scale * (layer.forward + layer.backward) for layer in self.profile.layers))

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Bytes of the parameters before each layer, and of all."""
        return (0.0, *accumulate(layer.parameters for layer in self.profile.layers))

    @cached_property
    def _needed(self) -> tuple[float, ...]:
        return (0.0, *accumulate(self.needs or (0.0,) * self.layers))

    def fits(self, first: int, last: int) -> bool:
        """Whether a device holds these layers."""
        return self._needed[last] - self._needed[first] <= self.room

    @property
    def layers(self) -> int:
        return len(self.profile.layers)

    @property
    def total(self) -> float:
        """ms of the whole global batch on one device."""
        return self.until[-1]

    def time(self, first: int, last: int) -> float:
        """ms of these layers for the whole global batch on one device."""
        return self.until[last] - self.until[first]

    def micro_batches(self, pipelines: int) -> int | None:
        """Of each pipeline; None where they would be no whole number."""
        whole, rest = divmod(self.batch, pipelines * self.micro_batch)
        return None if rest else whole

    def send(self, cut: int, before: Allocation, behind: Allocation) -> float:
        """ms to send what crosses behind layer ``cut``, of the whole global batch, once."""
        machines = {k for devices in (before, behind) for k, count in enumerate(devices) if count}
        speed = self.machines.inside if len(machines) == 1 else self.machines.send
        return 1e3 * self.profile.cuts[cut] * self.batch / self.profile_batch / speed

    def all_reduce(self, stage: Stage, pipelines: int, apart: bool) -> float:
        """ms to all-reduce a stage's gradients: inside a machine n / 2 devices send at once."""
        n = stage.replicas * pipelines
        size = 2 * (self.parameters[stage.last] - self.parameters[stage.first]) * (n - 1) / n
        inside = sum(count > 0 for count in stage.devices) == 1 and not apart
        return 1e3 * size / (self.machines.inside * n / 2 if inside else self.machines.reduce)


def hybrid_plan(instance: Instance, stages: tuple[Stage, ...], pipelines: int = 1, apart: bool = False) -> HybridPlan:
    """The plan with these stages and its latency.

    block = the longest stage over its replicas in all pipelines, or transfer there and back, over m. Latency =
    block (m - 1), and one micro-batch's way through all layers (published without dividing by the stages' replicas)
    and cuts, and what sticks out of the all-reduces: that of stage i has i blocks before the first stage ends.
    ValueError if m is no whole number.
    """
    m = instance.micro_batches(pipelines)
    if m is None:
        raise ValueError("the pipelines do not divide the batch")
    sends = [instance.send(a.last - 1, a.devices, b.devices) for a, b in pairwise(stages)]
    longest = max(instance.time(stage.first, stage.last) / (stage.replicas * pipelines) for stage in stages)
    block = max([longest, *(2 * send for send in sends)]) / m
    way = (instance.total + sum(sends)) / (pipelines * m)
    exposed = max(instance.all_reduce(stage, pipelines, apart) - i * block for i, stage in enumerate(stages))
    latency = block * (m - 1) + way + max(0.0, exposed)
    speed_up = instance.total / latency if latency else 1.0
    return HybridPlan(stages, pipelines, apart, m, block, latency, speed_up)


POLICIES = ("fresh-first", "append-first", "scatter-first")


def allocate(policy: str, used: Allocation, devices: int, count: int) -> Allocation:
    """``count`` devices of machines of ``devices`` each, of which ``used`` are taken. ValueError if they are too few.

    Fresh first takes machines that nothing is on, so that a stage stays in one. Append first fills those that have
    begun. Scatter first takes from all that have begun in turn, or from all machines where none has.
    """
    begun = [k for k, taken in enumerate(used) if taken]  # a full one gives none
    fresh = [k for k, taken in enumerate(used) if not taken]
    groups = {"fresh-first": (fresh, begun), "append-first": (begun, fresh), "scatter-first": (begun, fresh)}
    taken = [0] * len(used)
    left = count
    for group in groups[policy]:
        turns = _in_turn if policy == "scatter-first" else _one_by_one
        for machine in turns(group, [devices - used[k] for k in group]):
            if left:
                taken[machine] += 1
                left -= 1
    if left:
        raise ValueError("too few devices")
    return tuple(taken)


@lru_cache(maxsize=1 << 16)
def allocations(used: Allocation, devices: int, count: int) -> tuple[Allocation, ...]:
    """What the policies say, each once."""
    return tuple(dict.fromkeys(allocate(policy, used, devices, count) for policy in POLICIES))


@lru_cache(maxsize=1 << 16)
def every_allocation(used: Allocation, before: Allocation, devices: int, count: int) -> tuple[Allocation, ...]:
    """Every way to take ``count`` devices, behind a stage on ``before``.

    Of machines that are equally full and have equally much of the stage before, the first ones give most: which of
    them does makes no difference to any time.
    """
    alike = sorted(range(len(used)), key=lambda k: (used[k], before[k]))
    groups = [list(group) for _, group in groupby(alike, key=lambda k: (used[k], before[k]))]

    def falling(group: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        for taken in product(range(devices - used[group[0]] + 1), repeat=len(group)):
            if sum(taken) <= count and list(taken) == sorted(taken, reverse=True):
                yield tuple(zip(group, taken, strict=True))

    ways = []
    for parts in product(*map(falling, groups)):
        taken = dict(pair for part in parts for pair in part)
        if sum(taken.values()) == count:
            ways.append(tuple(taken[k] for k in range(len(used))))
    return tuple(ways)


def _one_by_one(machines: list[int], free: list[int]) -> Iterator[int]:
    """Every free device's machine, the first machine's first."""
    for machine, count in zip(machines, free, strict=True):
        yield from [machine] * count


def _in_turn(machines: list[int], free: list[int]) -> Iterator[int]:
    """Every free device's machine, one of each in turn."""
    turns = sorted((turn, place) for place, count in enumerate(free) for turn in range(count))
    return (machines[place] for _, place in turns)
