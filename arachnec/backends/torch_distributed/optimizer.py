"""AdamW over a stage's parameters: clipping by global norm, fp32 master copies of low-precision parameters, EMA.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019); master copies after Micikevicius et al.,
"Mixed Precision Training" (ICLR 2018), section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.kept_gradients import gradient_of
from arachnec.backends.torch_distributed.gradient_pieces import pieces_of
from arachnec.backends.torch_distributed.host_optimizer import HostMasters
from arachnec.backends.torch_distributed.parameter_parts import GatheredParts, Parts, own_parts
from arachnec.backends.torch_distributed.torch_optimizers import ADAMW, OptimizerFactory, kept_by
from arachnec.checkpoint.parts import Part
from arachnec.executable.training_options import Training

UPDATED_BYTES = 64 * 2**20  # of masters in one group of the optimizer
WHOLE = 2**63  # bytes of a piece, which a layer never has


class Optimizer:
    """The update of one stage.

    ``parameters`` by name, those that train only. A parameter below fp32 gets an fp32 master copy, which the optimizer
    updates and the parameter is rounded from. Without ``sharded`` every rank holds the whole state and computes the
    same; with it, every rank of ``group``, by default of all, holds its part of each parameter's state (``Parts``) and
    updates that (ZeRO, arXiv 1910.02054, section 5.1). The parameters are whole again once they were gathered
    (``gathered``), which all these ranks do together. With ``host`` the whole state lies in the host's memory, and
    the parameters on the device; ``on_host``: both do. ``factory`` makes another optimizer than AdamW.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        training: Training,
        *,
        sharded: bool = False,
        group: dist.ProcessGroup | None = None,
        host: HostMasters | None = None,
        on_host: bool = False,
        factory: OptimizerFactory | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._training = training
        self._host, self._on_host = host, on_host or host is not None
        self._parts = Parts.of(group) if sharded else None
        owned = own_parts(self._parts, self._parameters) if self._parts else self._parameters
        self._masters = {name: host.master(value) if host else _master(value) for name, value in owned.items()}
        # Group by group: the update of a group needs twice its size for a moment. A rank may have no part at all.
        groups = [{"params": piece} for piece in pieces_of(self._masters.values(), UPDATED_BYTES, _dtype)]
        nothing = torch.nn.Parameter(torch.empty(0))
        self.torch: torch.optim.Optimizer
        if factory is None:
            self._kept = ADAMW
            self.torch = torch.optim.AdamW(
                groups or [nothing],
                lr=training.lr,
                betas=(0.9, 0.95),
                weight_decay=0.01,
                eps=1e-8,
                fused=True,  # in one pass over memory, and on its device it sees whether the norm is finite
            )
        else:
            self._kept = kept_by(factory)
            self.torch = factory(list(self._masters.values()) or [nothing])
        self.ema = {n: m.detach().clone() for n, m in self._masters.items()} if training.ema else {}

    @property
    def sharded(self) -> bool:
        """Whether this rank holds parts only, and needs no whole gradients."""
        return self._parts is not None

    def gradients(self, parts: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """What this rank updates from, by name; none for a parameter that nothing used.

        ``parts`` are this rank's parts where it is ``sharded``; without, they are cut from whole gradients.
        """
        if parts is not None:
            return parts
        kept = {name: gradient_of(value) for name, value in self._parameters.items()}
        whole = {name: gradient for name, gradient in kept.items() if gradient is not None}
        return whole if self._parts is None else {name: self._parts.own(value) for name, value in whole.items()}

    @torch.no_grad()
    def scale_gradients(self, parts: Mapping[str, Tensor], factor: float) -> None:
        """Multiply the gradients where they are, this rank's ``parts`` of them too."""
        whole = [gradient_of(value) for value in self._parameters.values()]
        for gradient in (*parts.values(), *(value for value in whole if value is not None)):
            gradient.mul_(factor)

    @torch.no_grad()
    def step(self, parts: Mapping[str, Tensor] | None = None, norm: Tensor | None = None) -> Tensor:
        """Update from ``gradients(parts)``, and return the global norm before clipping: a scalar, on the device.

        ``norm`` is that of all ranks together where this one has not all gradients. A parameter without a gradient is
        left as it is, as ``torch.optim`` does. Where the norm is not finite nothing changes. The host does not wait for
        the device, unless torch's optimizer cannot look at the norm there.
        """
        given = self.gradients(parts)
        norm = global_norm(given) if norm is None else norm
        limit = self._training.clip_norm
        norm = norm.cpu() if self._on_host else norm
        if self._host is not None:
            given = self._host.gradients(given)
        for name, master in self._masters.items():
            master.grad = given[name].to(master.dtype) if name in given else None
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if limit and gradients:
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        finite = norm.isfinite()
        if getattr(self.torch, "_step_supports_amp_scaling", False):
            self.torch.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.torch.step()
        elif finite:
            self.torch.step()
        for master in self._masters.values():
            master.grad = None
        self.round_parameters()
        decay = self._training.ema
        if decay:
            weight = (1.0 - decay) * finite
            for name, average in self.ema.items():
                average.lerp_(self._masters[name], weight.to(average))
        return norm

    def tensors(self) -> dict[str, Tensor | Part]:
        """This rank's state as flat tensors over the memory in use; loading copies into them in place."""
        state: dict[str, Tensor | Part] = {}
        for name, master in self._masters.items():
            held = self._state_of(master)
            kept = {"master": master.detach()} | {key: held[key] for key in self._kept.like}
            kept |= {"ema": self.ema[name]} if self.ema else {}
            for key, value in kept.items():
                flat = value.view(-1)
                state[f"{key}/{name}"] = flat if self._parts is None else self._part(flat, self._parameters[name])
            for key in self._kept.scalars:
                count = held[key].view(1)
                state[f"{key}/{name}"] = (
                    count if self._parts is None else Part(count, 0, 1, writes=self._parts.rank == 0)
                )
        return state

    def _part(self, own: Tensor, value: Tensor) -> Part:
        assert self._parts is not None
        return Part(own, self._parts.rank * self._parts.length(value.numel()), value.numel())

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Write the master copies into the parameters, after an update or after loading; parts are gathered instead."""
        for name, master in self._masters.items() if self._parts is None else ():
            if self._host is not None:
                self._host.bring(name, self._parameters[name], master)
            elif master is not self._parameters[name]:
                self._parameters[name].copy_(master)

    def gathered(self, names: Iterable[str], group: dist.ProcessGroup | None = None) -> list[GatheredParts]:
        """Start to make these parameters whole from all ranks' masters. Collective over the ranks of the parts."""
        assert self._parts is not None, "every rank has updated the whole parameters"
        names = list(names)
        known = {id(self._parameters[name]): name for name in names}
        pieces = pieces_of((self._parameters[name] for name in names), WHOLE, _dtype)
        masters = [[self._own(known[id(value)], value) for value in piece] for piece in pieces]
        return [
            GatheredParts.started(self._parts, piece, own, group) for piece, own in zip(pieces, masters, strict=True)
        ]

    def _own(self, name: str, value: Tensor) -> Tensor:
        """This rank's part of a parameter's master, on the parameter's device."""
        master = self._masters.get(name, value.new_empty(0))
        if self._host is None or not master.numel():
            return master
        own = torch.empty(master.shape, dtype=value.dtype, device=value.device)
        self._host.bring(name, own, master)
        return own

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        # An optimizer makes its state at a parameter's first gradient; a checkpoint needs the tensors before that.
        state: dict[str, Tensor] = self.torch.state[master]
        for key in self._kept.like:
            if state.get(key) is None:
                state[key] = torch.zeros_like(master, memory_format=torch.preserve_format)
        for key in self._kept.scalars:
            if key not in state:
                state[key] = torch.zeros((), dtype=torch.float32)
        return state


@torch.no_grad()
def global_norm(gradients: Mapping[str, Tensor], device: torch.device | None = None) -> Tensor:
    """The 2-norm of all gradients together, in fp32 at least: a scalar where they are, else on ``device``."""
    values = gradients.values()
    norms = [torch.linalg.vector_norm(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in values]
    here: Tensor = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
    return here


@torch.no_grad()
def norm_over(group: dist.ProcessGroup | None, norm: Tensor) -> Tensor:
    """The norm of what all ranks of a group have together, from that of this rank's share. Collective."""
    squared = norm.double().square()
    dist.all_reduce(squared, group=group)
    total: Tensor = squared.sqrt().float()
    return total


def _dtype(value: Tensor) -> torch.dtype:
    return value.dtype


def _master(parameter: Tensor) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64) and parameter.is_contiguous():
        return parameter
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    copy = parameter.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    return torch.nn.Parameter(copy)
