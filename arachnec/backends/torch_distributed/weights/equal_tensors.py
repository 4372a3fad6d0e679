"""All ranks have made modules of the same tensors: before values travel, by names, shapes and precisions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import zip_longest

import msgspec
import torch.distributed as dist
from torch import nn

from arachnec.ir.diagnostic import Mistake, UserError
from arachnec.runtime.agreement import gather_text, share_text

Row = tuple[str, tuple[int, ...], str]
"""Name, shape and precision of a tensor."""


def tensors_differ_error(rank: int, own: str, first: str) -> Mistake:
    return Mistake(
        None,
        f"rank {rank} has made other modules than rank 0: {own}, where rank 0 has {first}",
        help=(
            "give every rank the same folder, options and versions of Python, torch and libraries; and have "
            "the model file make the same tensors on the meta device, where all but rank 0 build, as on the "
            "CPU"
        ),
    )


def demand_equal_tensors(modules: Mapping[str, nn.Module]) -> None:
    """Raises ``UserError`` with the first tensor that is another on some rank than on rank 0. Collective."""
    rows = [
        (f"{name}.{key}", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, module in sorted(modules.items())
        for key, tensor in (*module.named_parameters(), *module.named_buffers())
    ]
    text = msgspec.json.encode(rows).decode()
    digests = gather_text(hashlib.sha256(text.encode()).hexdigest())
    if len({*digests}) == 1:
        return
    whole = share_text(text if dist.get_rank() == 0 else None)  # only now: models have thousands of tensors
    rank_0 = msgspec.json.decode(whole, type=list[Row])
    pairs = ((own, first) for own, first in zip_longest(rows, rank_0) if own != first)
    told = gather_text(msgspec.json.encode([*map(_shown, next(pairs, (None, None)))]).decode())
    others = [(rank, msgspec.json.decode(row, type=tuple[str, str])) for rank, row in enumerate(told)]
    raise UserError(*(tensors_differ_error(rank, *pair) for rank, pair in others if digests[rank] != digests[0]))


def _shown(row: Row | None) -> str:
    if row is None:
        return "no further tensor"
    name, shape, precision = row
    return f"`{name}` {list(shape)} {precision}"
