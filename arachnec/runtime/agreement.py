"""What all ranks must have in common before the first step: files, versions, and each step's plan.

What ranks tell each other outside a program goes from host to host, never over their devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.ir.diagnostic import Mistake, UserError
from arachnec.ir.limits import LARGEST_PART

Own = TypeVar("Own")


def agree(digests: Mapping[str, str]) -> None:
    """Compare digests, by part, over all ranks. Raises ``UserError`` if any differ."""
    first, *others = gather_values(dict(digests), dict[str, str])
    differing = [
        Mistake(
            None,
            f"rank {rank} and rank 0 differ in {part}",
            help="give every rank the same folder and options, and the same versions of Python, torch and arachnec",
        )
        for rank, other in enumerate(others, 1)
        for part in sorted(part for part in first | other if first.get(part) != other.get(part))[:1]
    ]
    if differing:
        raise UserError(*differing)


def share_text(text: str | None, group: dist.ProcessGroup | None = None) -> str:
    """Rank 0's text on every rank of a group of all; the others give None."""
    data = (text or "").encode()
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    if not 0 <= int(size) <= LARGEST_PART:
        raise ValueError(f"a plan of {int(size)} bytes")
    if not int(size):
        return ""
    body = torch.empty(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(body, 0, group=group)
    return bytes(body.numpy()).decode()


def gather(value: Tensor) -> list[Tensor]:
    """This tensor of every rank, by rank; shapes must be equal."""
    own = value.cpu()
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return everyone


def gather_text(text: str) -> list[str]:
    """This text of every rank, by rank."""
    data = text.encode()
    sizes = [int(size) for size in gather(torch.tensor([len(data)]))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = gather(padded)
    return [bytes(row[:size].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]


def gather_values(own: Own, kind: Any) -> list[Own]:
    """This value of every rank, by rank; it travels as JSON, and is of this ``kind``."""
    return [msgspec.json.decode(row, type=kind) for row in gather_text(msgspec.json.encode(own).decode())]
