"""What all ranks must have in common before the first step: files, versions, and each step's plan.

What ranks tell each other outside a program goes from host to host, never over their devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.ir.diagnostic import Diagnostic, UserError

LIMIT_BYTES = 256 * 2**20
WORDS = 4  # 64-bit words of a SHA-256


@dataclass(frozen=True)
class RanksDiffer(Diagnostic):
    title: ClassVar[str] = "rank {rank} and rank 0 differ in {part}"
    help: ClassVar[str] = "give every rank the same folder, and the same versions of Python, torch and arachnec"
    part: str
    rank: int


def agree(digests: Mapping[str, str]) -> None:
    """Compare SHA-256 digests (hexadecimal, by part) over all ranks. Raises ``UserError`` if any differ."""
    parts = sorted(digests)
    words = [
        int.from_bytes(bytes.fromhex(digests[p])[8 * i : 8 * i + 8], signed=True) for p in parts for i in range(WORDS)
    ]
    counted = torch.tensor([len(parts), *words], dtype=torch.int64)
    padded = torch.zeros(1 + WORDS * 64, dtype=torch.int64)
    padded[: len(counted)] = counted
    everyone = gather(padded)
    differing = [
        RanksDiffer(None, parts[min(max(0, place - 1) // WORDS, len(parts) - 1)], rank)
        for rank, other in enumerate(everyone)
        for place in torch.nonzero(other != everyone[0])[:1, 0].tolist()
    ]
    if differing:
        raise UserError(*differing)


def share_text(text: str | None, group: dist.ProcessGroup | None = None) -> str:
    """Rank 0's text on every rank of a group of all; the others give None."""
    data = (text or "").encode()
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, 0, group=group)
    if not 0 <= int(size) <= LIMIT_BYTES:
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
