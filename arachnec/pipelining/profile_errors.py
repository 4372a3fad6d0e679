"""What can be wrong with a profile file, and with what is asked of a planner: each its own error."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.limits import LARGEST


@dataclass(frozen=True)
class BadProfileLine(Diagnostic):
    title = "no node and no edge of a profile"
    label = "cannot be read"
    help = (
        "write `node1 -- name -- forward_compute_time=1, backward_compute_time=2, activation_size=8, "
        "parameter_size=8`, or a tab and `node1 -- node2`"
    )


@dataclass(frozen=True)
class BadProfileNumber(Diagnostic):
    title = "`{field}` is `{given}`: {reason}"
    label = "{reason}"
    help = f"give `{{field}}` as a number of at least 0 and no more than {LARGEST:g}, times in ms and sizes in bytes"
    field: str
    given: str
    reason: str


@dataclass(frozen=True)
class RepeatedNode(Diagnostic):
    title = "`{node}` stands twice in the profile"
    label = "stands before"
    help = "give every node a name of its own"
    node: str


@dataclass(frozen=True)
class UnknownNode(Diagnostic):
    title = "an edge names `{node}`, which is no node of the profile"
    label = "no such node"
    help = "add a line for `{node}`, or remove the edge"
    node: str


@dataclass(frozen=True)
class CyclicProfile(Diagnostic):
    title = "the layers of the profile read each other in a cycle: {cycle}"
    label = "closes the cycle"
    help = "remove one of these edges: what comes later cannot be read before"
    cycle: str


@dataclass(frozen=True)
class TooManyLayers(Diagnostic):
    title = "the profile has more than {most} layers or {edges} edges"
    help = "profile blocks, not operations: a plan cuts between blocks"
    most: int
    edges: int


@dataclass(frozen=True)
class EmptyProfile(Diagnostic):
    title = "the profile has no layer"
    help = "give one line for every layer, then one for every edge"


@dataclass(frozen=True)
class BatchDoesNotDivide(Diagnostic):
    title = "a global batch of {batch} has no whole number of micro-batches of {micro_batch}"
    help = "give a global batch that is a multiple of {micro_batch}"
    batch: int
    micro_batch: int


@dataclass(frozen=True)
class NoDevices(Diagnostic):
    title = "a plan for {machines} machines of {devices} devices"
    help = "give at least one machine with at least one device"
    machines: int
    devices: int
