"""A request's scheduler. In: any of Diffusers', or an object of its form. Out: steps, and a history that can be moved.

A scheduler may keep tensors of the latents' shape from step to step (UniPC, DPM, Heun). These are its history. What
else it keeps must follow from the step's number, so a rank that takes a request over makes it by counting: it runs
the scheduler on a few numbers up to that step, and puts the history in their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.models.file import ran_out_of_memory

COUNTED = (1, 2, 3, 5, 7, 11, 13)  # sizes of latents that stand in while steps are counted; no scheduler's own


class Schedule:
    """A scheduler with the timesteps of one request. ``make`` gives a fresh one."""

    def __init__(self, make: Callable[[], Any], steps: int, device: torch.device | str = "cpu") -> None:
        self._make, self._asked, self._device = make, steps, torch.device(device)
        self.scheduler = make()
        self._previous: Tensor | None = None  # the predicted original, which CogVideoX's DPM is handed at every step
        accepted = inspect.signature(self.scheduler.step).parameters
        self._hands_previous = "old_pred_original_sample" in accepted
        self._options = {"return_dict": False} if "return_dict" in accepted else {}
        self._draws = "generator" in accepted
        self._set_timesteps()
        self.timesteps = tuple(self.scheduler.timesteps)
        if not self.timesteps:
            raise self._failed("it has no timesteps")
        self._begin(0)

    def __len__(self) -> int:
        """Forwards that the request takes: more than its steps where a scheduler looks at a step twice (Heun)."""
        return len(self.timesteps)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The timesteps as numbers."""
        return tuple(float(timestep) for timestep in self.timesteps)

    @property
    def training_steps(self) -> float:
        """The end of the range of timesteps."""
        return float(getattr(getattr(self.scheduler, "config", None), "num_train_timesteps", 1000))

    def model_input(self, latents: Tensor, step: int) -> Tensor:
        """What the model is given for the latents of a step."""
        scale = getattr(self.scheduler, "scale_model_input", None)
        return latents if scale is None else scale(latents, self.timesteps[step])

    def advance(self, prediction: Tensor, step: int, latents: Tensor, generator: torch.Generator | None) -> Tensor:
        """The latents after a step. Raises ``UserError`` where the scheduler fails, or gives something else."""
        try:
            advanced = self._advanced(prediction, step, latents, generator)
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            raise self._failed(f"at step {step + 1} {_reason(error)}") from error
        if not isinstance(advanced, Tensor) or advanced.shape != latents.shape:
            given = list(advanced.shape) if isinstance(advanced, Tensor) else type(advanced).__name__
            raise self._failed(f"step {step + 1} gives {given} for latents {list(latents.shape)}")
        return advanced

    def _advanced(self, prediction: Tensor, step: int, latents: Tensor, generator: torch.Generator | None) -> Any:
        timestep = self.timesteps[step]
        options = {**self._options, "generator": generator} if self._draws else self._options
        if self._hands_previous:
            before = self.timesteps[step - 1] if step and self._previous is not None else None
            result = self.scheduler.step(prediction, self._previous, timestep, before, latents, **options)
            self._previous = result[1]
        else:
            result = self.scheduler.step(prediction, timestep, latents, **options)
        if isinstance(result, Tensor):
            return result
        return result[0] if isinstance(result, tuple) else getattr(result, "prev_sample", result)

    def restart(self, step: int) -> None:
        """Forget the history before ``step``: it is taken as if it were the first."""
        self.scheduler = self._make()
        self._previous = None
        self._set_timesteps()
        self._begin(step)

    def history(self, like: Tensor) -> list[Tensor]:
        """The kept tensors of the latents' shape, in an order that follows from the steps taken."""
        return [leaf for leaf in self._leaves()[0] if _is_history(leaf, like.shape)]

    def restore(
        self,
        since: int,
        step: int,
        history: Sequence[Tensor],
        dtype: torch.dtype = torch.float32,
        *,
        shape: Sequence[int],
    ) -> None:
        """Stand before ``step`` with a history that began at ``since``, of latents of a ``shape``."""
        self._count(since, step, dtype, len(shape))
        leaves, spec = self._leaves()
        moved = iter(history)
        placed = [next(moved) if _is_history(leaf, COUNTED[: len(shape)]) else _sized(leaf, shape) for leaf in leaves]
        state = pytree.tree_unflatten(placed, spec)
        vars(self.scheduler).update(state["scheduler"])
        self._previous = state["previous"]

    def kept(self, since: int, step: int, like: Tensor) -> list[torch.dtype]:
        """The precision of every tensor of the history before ``step``: what a rank that takes over receives."""
        counted = Schedule(self._make, self._asked, self._device)
        counted._count(since, step, like.dtype, like.ndim)
        return [leaf.dtype for leaf in counted.history(torch.empty(COUNTED[: like.ndim]))]

    def longest_history(self, like: Tensor) -> int:
        """The most bytes that the history has for one number of the latents, before whichever step."""
        counted = Schedule(self._make, self._asked, self._device)
        longest = 0
        for step in range(len(self)):
            counted._count_one(step, like.dtype, like.ndim)
            leaves = counted.history(torch.empty(COUNTED[: like.ndim]))
            longest = max(longest, sum(leaf.dtype.itemsize for leaf in leaves))
        return longest

    def demand_counted(self, since: int, step: int, like: Tensor) -> None:
        """Raises ``UserError`` where the scheduler keeps what neither moves with the history nor follows by counting.

        ``step`` is the next one, of a history that began at ``since``.
        """
        counted = Schedule(self._make, self._asked, self._device)
        counted._count(since, step, like.dtype, like.ndim)
        (own, own_spec), (theirs, spec) = self._leaves(), counted._leaves()
        same = own_spec == spec and all(_alike(a, like.shape, b) for a, b in zip(own, theirs, strict=True))
        if not same:
            raise user_error(
                f"the scheduler {type(self.scheduler).__name__} keeps other values after step {step} than the step's "
                "number tells",
                help=(
                    "what a scheduler keeps between steps must be tensors of the latents' shape, or follow from the "
                    "step's number"
                ),
            )

    def _count(self, since: int, step: int, dtype: torch.dtype, dimensions: int) -> None:
        self.restart(since)
        for number in range(since, step):
            self._count_one(number, dtype, dimensions)

    def _count_one(self, step: int, dtype: torch.dtype, dimensions: int) -> None:
        latents = torch.full(COUNTED[:dimensions], 0.5, dtype=dtype, device=self._device)
        self.model_input(latents, step)  # some schedulers note that they were asked for it
        prediction = latents.to(torch.float32, copy=True)
        self.advance(prediction, step, latents, torch.Generator("cpu").manual_seed(0))

    def _leaves(self) -> tuple[list[Any], Any]:
        kept = {"scheduler": dict(vars(self.scheduler)), "previous": self._previous}
        return pytree.tree_flatten(kept, is_leaf=lambda value: isinstance(value, torch.Size))

    def _set_timesteps(self) -> None:
        accepted = inspect.signature(self.scheduler.set_timesteps).parameters
        options = {"device": self._device} if "device" in accepted else {}
        try:
            self.scheduler.set_timesteps(self._asked, **options)
        except Exception as error:
            raise self._failed(_reason(error)) from error

    def _failed(self, reason: str) -> UserError:
        return user_error(
            f"the scheduler {type(self.scheduler).__name__} cannot take {self._asked} steps: {reason}",
            help="change the request's `steps`, or the scheduler: step(prediction, timestep, latents) gives latents",
        )

    def _begin(self, step: int) -> None:
        begin = getattr(self.scheduler, "set_begin_index", None)
        if begin is not None:
            begin(step)


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if said else ''}{said}"


def _is_history(leaf: object, shape: Sequence[int]) -> bool:
    return isinstance(leaf, Tensor) and tuple(leaf.shape) == tuple(shape)


def _sized(leaf: object, shape: Sequence[int]) -> object:
    """What is kept of the size of the latents that stood in, of these."""
    counted = COUNTED[: len(shape)]
    known = isinstance(leaf, torch.Size) and len(leaf) and tuple(leaf) == counted[-len(leaf) :]
    return torch.Size(shape[-len(leaf) :]) if known else leaf  # type: ignore[arg-type]


def _alike(own: object, shape: Sequence[int], counted: object) -> bool:
    """Whether a value that a scheduler keeps is history in both, or the same in both."""
    stand_in = COUNTED[: len(shape)]
    if _is_history(own, shape) or _is_history(counted, stand_in):
        return _is_history(own, shape) and _is_history(counted, stand_in)
    if isinstance(own, Tensor) and isinstance(counted, Tensor):
        return own.shape == counted.shape and torch.allclose(own, counted, rtol=0, atol=0, equal_nan=True)
    if isinstance(own, torch.Size):
        return isinstance(counted, torch.Size) and own == _sized(counted, shape)
    if callable(own) or not isinstance(own, int | float | str | None):
        return type(own) is type(counted)
    return own == counted
