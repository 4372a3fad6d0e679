"""AdamW over a stage's parameters: clipping by global norm, fp32 master copies of low-precision parameters, EMA.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019); master copies after Micikevicius et al.,
"Mixed Precision Training" (ICLR 2018), section 3.1.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.torch_distributed.owned_parameters import share_owned
from arachnec.executable.training_options import Training

STATE = ("exp_avg", "exp_avg_sq", "step")


class Optimizer:
    """The update of one stage.

    ``parameters`` by name, those that train only. A parameter below fp32 gets an fp32 master copy, which the optimizer
    updates and the parameter is rounded from. Without ``sharded`` every rank holds the whole state and computes the
    same; with it, each parameter's state lies on one rank of the default process group, which updates the parameter and
    sends it to the others (ZeRO, arXiv 1910.02054, section 5.1), and every method is called by all ranks together.
    ``norm`` is asked for the gradients' norm where other ranks have other parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        training: Training,
        *,
        sharded: bool = False,
        norm: Callable[[Mapping[str, Tensor]], Tensor] | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._training = training
        self._norm = norm or global_norm
        self._owners = owners(self._parameters, dist.get_world_size()) if sharded else {}
        mine = [name for name in self._parameters if self._owners.get(name) in (None, _rank(sharded))]
        self._masters = {name: _master(self._parameters[name]) for name in mine}
        self._adam = torch.optim.AdamW(
            # a rank of a frozen stage has none
            list(self._masters.values()) or [torch.nn.Parameter(torch.empty(0))],
            lr=training.lr,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            eps=1e-8,
        )
        self.ema = {n: m.detach().clone() for n, m in self._masters.items()} if training.ema else {}

    @torch.no_grad()
    def step(self) -> Tensor:
        """Update from the parameters' gradients, and return their global norm before clipping: a scalar, on the device.

        A parameter without a gradient is left as it is, as ``torch.optim`` does. The host does not wait for the device.
        """
        norm = self._norm(self._parameters)
        limit = self._training.clip_norm
        for name, master in self._masters.items():
            gradient = self._parameters[name].grad
            master.grad = None if gradient is None else gradient.to(master.dtype)
        gradients = [master.grad for master in self._masters.values() if master.grad is not None]
        if limit and gradients:
            torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        self._adam.step()
        for master in self._masters.values():
            master.grad = None
        self.round_parameters()
        decay = self._training.ema
        if decay:
            for name, average in self.ema.items():
                average.lerp_(self._masters[name], 1.0 - decay)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """This rank's state as a flat mapping of tensors, the very ones in use; loading copies into them in place."""
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state[f"master/{name}"] = master.detach()
            held = self._state_of(master)
            state |= {f"{key}/{name}": held[key] for key in STATE}
            if self.ema:
                state[f"ema/{name}"] = self.ema[name]
        return state

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Write the master copies into the parameters, on every rank: after an update, or after loading."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)
        if self._owners:
            share_owned(self._parameters, self._owners)

    def _state_of(self, master: Tensor) -> dict[str, Tensor]:
        # AdamW makes its state at a parameter's first gradient; a checkpoint needs the tensors before that.
        state: dict[str, Tensor] = self._adam.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        return state


def owners(parameters: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """The rank that updates each parameter: the largest first, each to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    owned: dict[str, int] = {}
    for name in sorted(parameters, key=lambda name: (-parameters[name].numel(), name)):
        load, rank = heapq.heappop(loads)
        owned[name] = rank
        heapq.heappush(loads, (load + parameters[name].numel(), rank))
    return owned


def _rank(sharded: bool) -> int | None:
    return dist.get_rank() if sharded else None


@torch.no_grad()
def global_norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """The 2-norm of all gradients together, accumulated in fp32: a scalar where the gradients are."""
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in parameters.values() if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _master(parameter: Tensor) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return torch.nn.Parameter(parameter.detach().float().clone())
