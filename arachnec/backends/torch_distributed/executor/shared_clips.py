"""Clips that groups of ranks share: a rank's own part of a cascade, and whether its ranks made the same batch of it.

``sample`` may draw random numbers that are not its generator's, and then every rank trains on another clip. So in the
first step that a run takes with a clip its ranks compare what they made, by one number in what all ranks exchange of a
step anyway.
"""

from __future__ import annotations

import platform
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cascade, Instruction, Module, Program, integer
from arachnec.ir.parameter_cells import side_by_side
from arachnec.models.clip_errors import shown_clips
from arachnec.runtime.agreement import gather_values


def own_part(cascade: Cascade, rank: int) -> Cascade:
    """The cascade with the rank's own clips and ranks; as it is where it has one group, or not this rank."""
    if cascade.side == 1 or rank not in cascade.ranks:
        return cascade
    number = cascade.ranks.index(rank) // cascade.degree
    count = len(cascade.clips) // cascade.side
    clips = cascade.clips[number * count : (number + 1) * count]
    ranks = side_by_side(cascade.ranks, cascade.side)[number]
    part = replace(cascade, clips=clips, batch=cascade.batch // cascade.side)
    return part.with_attrs(side=None, ranks=ranks)


def parts_of(instruction: Instruction) -> tuple[Instruction, ...]:
    """A forward or backward as each of its groups runs it."""
    side = integer(instruction.attrs.get("side", 1))
    if side == 1:
        return (instruction,)
    attrs = instruction.attrs.updated(side=None)
    return tuple(replace(instruction, peers=ranks, attrs=attrs) for ranks in side_by_side(instruction.peers, side))


def own_program(program: Program) -> Program:
    """A rank's program with the groups of its own clips; the same instructions otherwise."""
    forwards = {step.target: step for step in program.instructions if step.op == "forward" and "side" in step.attrs}
    if not forwards:
        return program
    return replace(program, instructions=tuple(_own(step, forwards, program.rank) for step in program.instructions))


def _own(step: Instruction, forwards: dict[str, Instruction], rank: int) -> Instruction:
    forward = forwards.get(step.target)
    if forward is None or step.op not in ("forward", "backward"):
        return step
    mine = next(part.peers for part in parts_of(forward) if rank in part.peers)
    return replace(step, peers=mine, attrs=step.attrs.updated(side=None))


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
    by_rank = list(map(dict, gather_values([*digests.items()], list[tuple[tuple[int, ...], Digest]])))
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
