"""An optimizer of torch over a stage's parameters: clipping by global norm, fp32 master copies of low-precision
parameters, EMA, rates by step.

Master copies after Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.1. Which optimizer, and which
arguments a parameter's update has, a ``Recipe`` says; what it keeps lies in ``KeptState``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.checkpoint.parts import AVERAGE, Part
from arachnec.executable.training_options import Schedule, Training
from arachnec.model_state.gradients import pieces_of
from arachnec.model_state.kept_gradients import gradient_of
from arachnec.model_state.parameter_parts import GatheredParts, Parts, own_parts
from arachnec.optimizers.kept_state import KeptState
from arachnec.optimizers.own_scripts import told_update
from arachnec.optimizers.recipe import ParameterGroup, Recipe, has_modes, recipe_of
from arachnec.optimizers.schedules import Rates, demand_schedule
from arachnec.optimizers.state import KeptEntries
from arachnec.runtime.host_copies import HostMasters

UPDATED_BYTES = 64 * 2**20  # of masters in one group of the optimizer
WHOLE = 2**63  # bytes of a piece, which a layer never has
WIDENED = 2**17  # numbers of a gradient that are widened at one time, in a cache


class Optimizer:
    """The update of one stage.

    ``parameters`` by name, those that train only. A parameter below fp32 gets an fp32 master copy, which the optimizer
    updates and the parameter is rounded from. Without ``sharded`` every rank holds the whole state and computes the
    same; with it, every rank of ``group``, by default of all, holds its part of each parameter's state (``Parts``) and
    updates that (ZeRO, arXiv 1910.02054, section 5.1). The parameters are whole again once they were gathered
    (``gathered``), which all these ranks do together. With ``host`` the whole state lies in the host's memory, and
    the parameters on the device; ``on_host``: both do. ``recipe`` is that of the whole model, where this rank has
    pieces of it or the model file has an optimizer of its own.
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
        recipe: Recipe | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._training = training
        self._host, self._on_host = host, on_host or host is not None
        self._parts = Parts.of(group) if sharded else None
        self.recipe = recipe or recipe_of(self._parameters, training)
        assert self.recipe.elementwise or not sharded, "parts of parameters are updated element by element"
        owned = own_parts(self._parts, self._parameters) if self._parts else self._parameters
        self._masters = {name: host.master(value) if host else _master(value) for name, value in owned.items()}
        groups = tuple(self._fused(group) for group in self.recipe.groups)
        runs = [(run, number) for number, group in enumerate(groups) for run in self._runs(group)]
        self.torch = self.recipe.make([(run, groups[number]) for run, number in runs])
        numbers = range(len(groups)) if self.recipe.kind is None else (number for _, number in runs)
        self._group_of = tuple(numbers) or (0,)  # of each of torch's groups
        self._kept = KeptState(self.recipe, groups, self.torch)
        self._kept.expect(self._masters)
        self._entries = KeptEntries(self.torch) if self.recipe.kind is None else None
        self._rates = Rates(training.schedule, [group.arguments for group in groups])
        self.sets_rates = True  # unless somebody else's schedule does
        self.done = 0  # updates, those before a resumed run included
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
        the device, unless torch's optimizer cannot look at the norm there. Raises ``UserError`` where an optimizer of
        the user's own does.
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
        self._kept.settle(self._masters)
        if self.sets_rates:
            self._set_rates()
        finite = norm.isfinite()
        if getattr(self.torch, "_step_supports_amp_scaling", False):
            self.torch.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self._update()
            self._kept.updated(self._masters)
        elif finite:
            self._update()
            self._kept.updated(self._masters)
        self.done += 1
        for master in self._masters.values():
            master.grad = None
        self.round_parameters()
        decay = self._training.ema
        if decay:
            weight = (1.0 - decay) * finite
            for name, average in self.ema.items():
                average.lerp_(self._masters[name], weight.to(average))
        return norm

    def _update(self) -> None:
        with told_update(self.recipe, type(self.torch).__name__, self.done), ExitStack() as stack:
            if self._entries is not None:
                stack.enter_context(self._entries.watched())
            self.torch.step()

    def tensors(self) -> dict[str, Tensor | Part]:
        """This rank's state as flat tensors over the memory in use; loading copies into them in place."""
        state: dict[str, Tensor | Part] = {}
        for name, master in self._masters.items():
            elements, scalars = self._kept.of(name, master)
            kept = {"master": master.detach(), **elements} | ({AVERAGE: self.ema[name]} if self.ema else {})
            for key, value in kept.items():
                flat = value.view(-1)
                state[f"{key}/{name}"] = flat if self._parts is None else self._part(flat, self._parameters[name])
            for key, count in scalars.items():
                state[f"{key}/{name}"] = (
                    count if self._parts is None else Part(count, 0, 1, writes=self._parts.rank == 0)
                )
        return state

    def entries(self) -> str:
        """What the optimizer remembers in its groups, as text; empty where that is nothing."""
        return "" if self._entries is None else self._entries.text()

    def take_entries(self, text: str) -> None:
        """Put back what ``entries`` gave."""
        if self._entries is not None:
            self._entries.take(text)

    @property
    def has_modes(self) -> bool:
        """Whether the weights to use are others than those that train."""
        return self.recipe.kind is None and has_modes(self.torch)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, masters and parameters are the weights to use: to validate, to sample, to export. Behind it they are
        those that train, to the bit, which waits in the host's memory meanwhile."""
        if not self.has_modes:
            yield
            return
        self._kept.settle(self._masters)
        training = {name: master.detach().to("cpu", copy=True) for name, master in self._masters.items()}
        self.torch.eval()  # type: ignore[attr-defined]
        self.round_parameters()
        try:
            yield
        finally:
            self.torch.train()  # type: ignore[attr-defined]
            with torch.no_grad():
                for name, master in self._masters.items():
                    master.copy_(training[name])
            self.round_parameters()

    def weights_in_use(self) -> dict[str, Tensor]:
        """Copies of those weights on the host, by name; none where they are those that train."""
        if not self.has_modes:
            return {}
        with self.in_use():
            return {name: master.detach().to("cpu", copy=True) for name, master in self._masters.items()}

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

    @property
    def first_group(self) -> int:
        """The number of the group, among those of the whole model, that `rate` is of; -1 where nothing lies here."""
        return self._group_of[0] if self._masters else -1

    @property
    def rate(self) -> float:
        """The learning rate of the first group in the latest update; 0 where the optimizer has its own."""
        return float(self.torch.param_groups[0].get("lr") or 0.0)

    def demand_lasting(self, steps: int) -> None:
        """Raises ``UserError`` for a schedule that ends before so many updates."""
        demand_schedule(self._training.schedule, [group.arguments for group in self.recipe.groups], steps)

    def _set_rates(self) -> None:
        rates = self._rates.at(self.done)
        scheduled = self._training.schedule != Schedule()
        for place, (group, number) in enumerate(zip(self.torch.param_groups, self._group_of, strict=True)):
            given = rates[number] if rates else {}
            if not scheduled and self._entries is not None:  # some set their rate themselves
                given = {key: value for key, value in given.items() if not self._entries.sets(place, key)}
            group.update(given)

    def _runs(self, group: ParameterGroup) -> list[list[Tensor]]:
        """A group's masters, piece by piece: the update of a piece needs twice its size for a moment."""
        return pieces_of((self._masters[n] for n in group.names if n in self._masters), UPDATED_BYTES, _dtype)

    def _fused(self, group: ParameterGroup) -> ParameterGroup:
        """In one pass over memory, and on its device it sees whether the norm is finite."""
        arguments = group.arguments
        asked = any(arguments.get(key) is not None for key in ("foreach", "fused"))
        if self.recipe.kind not in (torch.optim.Adam, torch.optim.AdamW) or asked or arguments.get("differentiable"):
            return group
        return replace(group, arguments={**arguments, "fused": True})


@torch.no_grad()
def global_norm(gradients: Mapping[str, Tensor], device: torch.device | None = None) -> Tensor:
    """The 2-norm of all gradients together, in fp32 at least: a scalar where they are, else on ``device``."""
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for value in gradients.values():
        of_dtype.setdefault(torch.promote_types(value.dtype, torch.float32), []).append(value)
    norms = [norm for dtype, values in of_dtype.items() for norm in _norms(values, dtype)]
    here: Tensor = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
    return here


def _norms(values: list[Tensor], dtype: torch.dtype) -> Iterable[Tensor]:
    """The 2-norm of each in ``dtype``. torch's own of bf16 on a processor takes seven times as long as widening it."""
    if values[0].device.type != "cpu" or all(value.dtype == dtype for value in values):
        return torch._foreach_norm(values, 2, dtype)
    return [_widened_norm(value, dtype) for value in values]


def _widened_norm(value: Tensor, dtype: torch.dtype) -> Tensor:
    room = torch.empty(min(value.numel(), WIDENED), dtype=dtype)
    pieces = torch.split(value.reshape(-1), WIDENED)
    norms = [torch.linalg.vector_norm(room[: piece.numel()].copy_(piece)) for piece in pieces]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole


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
