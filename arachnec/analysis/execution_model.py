"""What a back end really does with a lowered program: what the proofs, the simulator and the executor agree on.

A handoff over the *host* network (gloo, CPU tensors in pinned memory) occupies no stream of a device. A handoff from
*device* to device (NCCL) is a kernel on both ranks: it spins from where it is posted until the other side is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

HandoffPath: TypeAlias = Literal["host", "device"]
ReceivePosting: TypeAlias = Literal["in-place", "prefetched", "after-dependencies"]
Connections: TypeAlias = Literal["start", "first-use"]

STREAMS = 32  # in torch's pool; with more communicators than that two share one
HARDWARE_QUEUES = 8  # of a device, by default (CUDA_DEVICE_MAX_CONNECTIONS); one of them computes


@dataclass(frozen=True)
class ExecutionModel:
    """How one back end runs handoffs.

    ``receives`` are posted where they stand, as early as memory allows, or as early as memory and what their sends
    depend on allow. ``connections`` between two ranks that hand values over are made before the program starts, or at
    the first use, for which both hosts wait.
    """

    handoffs: HandoffPath = "host"
    receives: ReceivePosting = "prefetched"
    connections: Connections = "start"

    @property
    def posted_place_counts(self) -> bool:
        """Whether it matters to other ranks where a receive is posted: it holds up its device, or its host."""
        return self.handoffs == "device" or self.connections == "first-use"


HOST_HANDOFFS = ExecutionModel()
DEVICE_HANDOFFS = ExecutionModel("device", "after-dependencies")
