"""Where rank 0 says how the run goes: to the launcher's display, or as plain lines where there is none."""

from __future__ import annotations

import hashlib
import os

import msgspec

from arachnec.backends.torch_distributed.reporting.report import Event, Note, Start, StepReport
from arachnec.ir.diagnostic import counted
from arachnec.launch.environment import EVENTS_FD


def emit(event: Event) -> None:
    """Report from rank 0; the other ranks have nothing to say."""
    import torch.distributed as dist

    if dist.get_rank() != 0:
        return
    channel = os.environ.get(EVENTS_FD)
    if channel is None:
        print(line(event), flush=True)
    else:
        os.write(int(channel), msgspec.json.encode(event) + b"\n")


def decode(data: bytes) -> Event:
    event: Event = msgspec.json.decode(data, type=StepReport | Note | Start)
    return event


def line(event: Event) -> str:
    """An event as one line of text."""
    if isinstance(event, Note):
        return f"note: {event.text}"
    if isinstance(event, Start):
        steps, ranks = counted(event.steps, "step"), counted(event.ranks, "rank")
        return f"{steps} from step {event.first_step} on {ranks} ({event.device})"
    assert isinstance(event, StepReport)
    loss = "is not finite" if event.loss is None else f"{event.loss:.6f}"
    return (
        f"step {event.step:5d}  loss {loss}  {event.step_ms:8.1f} ms (planned {event.planned_ms:.1f})  "
        f"imbalance {event.imbalance:.3f}  {event.tokens_per_s:,.0f} tokens/s  peak {event.peak_memory_gib:.2f} GiB"
    )


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
