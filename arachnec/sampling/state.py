"""A request's state as bytes, to hand on. In: a loop on one rank. Out: the same loop on another.

The bytes of a request are as many at every step and at every outcome of its switch, so the receiver knows their number
before anything is sent: a head, the generator, the latents, the last prediction, and room for the longest history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from arachnec.sampling.loop import Loop

HEAD = 3  # step, K or -1, whether it has failed; the distances follow


def state_bytes(loop: Loop) -> int:
    """How many bytes the state of this request has."""
    latents = loop.latents
    sizes = (HEAD + len(loop.schedule)) * 8, loop.generator.get_state().nbytes, latents.nbytes, latents.numel() * 4
    return sum(sizes) + loop.sampling.longest_history(loop.request, latents) * latents.numel()


def packed(loop: Loop) -> Tensor:
    """uint8 ``[state_bytes]`` on the latents' device; nobody waits for it."""
    distances = loop.distances + [0.0] * (len(loop.schedule) - len(loop.distances))
    switched = -1 if loop.switched is None else loop.switched
    head = torch.tensor([loop.step, switched, float(loop.failed), *distances], dtype=torch.float64)
    previous = torch.zeros_like(loop.latents) if loop.previous is None else loop.previous
    history = loop.schedule.history(loop.latents)
    if loop.step and not loop.failed:
        loop.schedule.demand_counted(loop.history_since, loop.step, loop.latents)
    parts = [head, loop.generator.get_state(), loop.latents, previous.float(), *history]
    flat = torch.cat([_bytes(part, loop.latents.device) for part in parts])
    return torch.cat([flat, flat.new_zeros(state_bytes(loop) - flat.numel())])


def unpack(state: Tensor, loop: Loop) -> None:
    """Have a request that has just begun stand where the packed one does. ``state`` is in the host's memory."""
    numbers, latents = len(loop.schedule) + HEAD, loop.latents
    parts = _cut(state.cpu(), [numbers * 8, loop.generator.get_state().nbytes, latents.nbytes, latents.numel() * 4])
    head = next(parts).view(torch.float64).tolist()
    loop.step, loop.failed = int(head[0]), bool(head[2])
    loop.switched = None if head[1] < 0 else int(head[1])
    loop.distances = head[HEAD : HEAD + loop.step]
    loop.generator.set_state(next(parts))
    loop.latents = next(parts).view(latents.dtype).reshape(latents.shape).to(latents.device, non_blocking=True)
    previous = next(parts).view(torch.float32).reshape(latents.shape).to(latents.device, non_blocking=True)
    loop.previous = previous if loop.step else None
    if loop.failed:
        return
    dtypes = loop.schedule.kept(loop.history_since, loop.step, latents)
    rest = _cut(next(parts), [dtype.itemsize * latents.numel() for dtype in dtypes])
    history = [
        part.view(dtype).reshape(latents.shape).to(latents.device, non_blocking=True)
        for dtype, part in zip(dtypes, rest, strict=False)
    ]
    loop.schedule.restore(loop.history_since, loop.step, history, latents.dtype, shape=latents.shape)


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, non_blocking=True).contiguous().reshape(-1).view(torch.uint8)


def _cut(flat: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
    """Consecutive pieces of these sizes, each of its own memory, then what is left."""
    offset = 0
    for size in sizes:
        yield flat[offset : offset + size].clone()
        offset += size
    yield flat[offset:]
