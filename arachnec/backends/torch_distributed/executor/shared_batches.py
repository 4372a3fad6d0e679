"""Whether the ranks that share a clip made the same batch of it. In: digests of each rank. Out: nothing, or an error.

``sample`` may draw random numbers that are not its generator's, and then every rank trains on another clip. So in the
first step that a run takes with a clip its ranks compare what they made, by one number in what all ranks exchange of a
step anyway.
"""

from __future__ import annotations

import platform
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.backends.torch_distributed.executor.side_by_side import own_part
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Module
from arachnec.models.clip_errors import shown_clips
from arachnec.runtime.agreement import gather_text

BITS = 0xFFFFFF  # of a digest: a sum over all ranks and clips is exact in fp64
Makers = Mapping[tuple[int, ...], tuple[int, ...]]  # by clips the ranks that make a batch of them
Digest = tuple[int, int]  # of the processor and of what encoders gave, and of the batch


def digest_of(encoded: Mapping[str, Tensor], batch: Any) -> Digest:
    """Of what a batch on the host was made from, and of itself."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"  # others round otherwise
    made_from = (processor, *(encoded[name] for name in sorted(encoded)))
    return _sum(made_from), _sum(pytree.tree_leaves(batch))


def _sum(leaves: Iterable[object]) -> int:
    crc = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            data = leaf.detach().contiguous().view(-1).view(torch.uint8).numpy()
            crc = zlib.crc32(data, crc)  # type: ignore[arg-type]
        elif isinstance(leaf, int | float | str):
            crc = zlib.crc32(repr(leaf).encode(), crc)
    return crc & BITS


@dataclass
class SharedBatches:
    """What the ranks of a run have compared; the same on every rank."""

    _seen: set[str | int] = field(default_factory=set)

    def wanted(self, module: Module, clips: Mapping[int, VideoClip]) -> Makers:
        """The batches of this step that several ranks make, with a clip that is seen for the first time."""
        new = {number for number, clip in clips.items() if clip.id not in self._seen}
        if not new:
            return {}
        self._seen.update(clips[number].id for number in new)
        cascades = {cascade.name: cascade for cascade in module.cascades}
        makers: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for program in module.programs:
            for instruction in program.instructions:
                if instruction.op == "forward":
                    makers[own_part(cascades[instruction.target], program.rank).clips].add(program.rank)
        return {key: tuple(sorted(ranks)) for key, ranks in makers.items() if len(ranks) > 1 and new & set(key)}


def difference(makers: Makers, digests: Mapping[tuple[int, ...], Digest], rank: int) -> float:
    """A rank's term of a sum that is 0 where all ranks of each batch have made the same."""
    total = 0
    for clips, (_, digest) in digests.items():
        first, *others = makers[clips]
        total += -len(others) * digest if rank == first else digest
    return float(total)


def demand_equal_batches(
    step: int, makers: Makers, digests: Mapping[tuple[int, ...], Digest], clips: Mapping[int, VideoClip]
) -> None:
    """Raises ``UserError``, on every rank, for a batch that its ranks have made otherwise of equal inputs. Collective.

    Encoders that several kinds of device share, and processors of several kinds, may differ by rounding, which is no
    mistake.
    """
    rows = gather_text(msgspec.json.encode([(list(key), digest) for key, digest in digests.items()]).decode())
    by_rank = [
        {tuple(key): digest for key, digest in msgspec.json.decode(row, type=list[tuple[list[int], Digest]])}
        for row in rows
    ]
    for key, ranks in sorted(makers.items()):
        firsts: dict[int, int] = {}  # of those that made it from the same
        for rank in ranks:
            digest = by_rank[rank].get(key)
            first = rank if digest is None else firsts.setdefault(digest[0], rank)
            if digest != by_rank[first].get(key):
                raise user_error(
                    f"rank {first} and rank {rank} share {shown_clips([clips[clip] for clip in key])} in step {step}, "
                    "and made other batches of it",
                    help=(
                        "`sample` draws random numbers that are not its generator's: draw them as torch.randn(shape, "
                        "generator=generator), and nothing by randn_like, random or numpy; all ranks of a clip must "
                        "draw the same"
                    ),
                )
