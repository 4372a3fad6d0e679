"""One request's denoising loop. In: its noise, and a function that predicts. Out: its latents, and where it switched.

The state of a loop is what a rank hands on where another continues: latents, the scheduler's history, the random
generator, the last guided prediction, and the curve of its distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL, Switch
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.models.sampler_file import SamplerFile
from arachnec.sampling.schedule import Schedule


@dataclass(frozen=True)
class Point:
    """What a step predicts from: the latents as the model is given them, the timestep, and whose they are."""

    latents: Tensor
    timestep: Tensor
    request: Request


Predict = Callable[[str, Sequence[Point]], list[Tensor]]
"""The guided predictions of the model of a name, one for every point."""


@dataclass(frozen=True)
class Sampling:
    """How requests are sampled: the models in the order in which a request meets them, the rule, and its history."""

    sampler: SamplerFile
    names: tuple[str, ...]
    switch: Switch = ONE_MODEL
    restart: bool = False  # whether the second model's first step is taken without the scheduler's history
    _longest: dict[tuple[int, torch.dtype, int], int] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def schedule(self, request: Request, device: torch.device | str = "cpu") -> Schedule:
        return Schedule(self.sampler.scheduler, request.steps, device)

    def longest_history(self, request: Request, latents: Tensor) -> int:
        """The most bytes that the scheduler's history has for one number of the latents, counted once."""
        key = request.steps, latents.dtype, latents.ndim
        if key not in self._longest:
            self._longest[key] = self.schedule(request).longest_history(latents)
        return self._longest[key]

    def bounds(self, schedule: Schedule) -> tuple[int, int]:
        """The least and the most steps that the first model takes of a request."""
        if len(self.names) == 1:
            return len(schedule), len(schedule)
        return self.switch.bounds(schedule.numbers, schedule.training_steps)


@dataclass
class Loop:
    """A request on its way. ``step`` is the next step; ``switched`` is K, once it is decided.

    One that has ``failed``, because its latents are no numbers any more, takes no further step.
    """

    sampling: Sampling
    request: Request
    schedule: Schedule
    latents: Tensor
    generator: torch.Generator
    step: int = 0
    switched: int | None = None
    previous: Tensor | None = None
    distances: list[float] = field(default_factory=list)
    failed: bool = False
    pending: list[Tensor] = field(default_factory=list)  # distance, and whether all is finite, of steps not yet read

    @property
    def ended(self) -> bool:
        return self.step == len(self.schedule)

    @property
    def model(self) -> str:
        """Who takes the next step."""
        names = self.sampling.names
        return names[0] if self.switched is None or self.step < self.switched or len(names) == 1 else names[1]

    @property
    def history_since(self) -> int:
        """The step at which the scheduler's history began."""
        later = self.switched is not None and self.step > self.switched
        return self.switched or 0 if later and self.sampling.restart else 0

    def takes(self, model: str | None, until: int | None = None) -> bool:
        """Whether the next step is one before ``until``, and is this model's; of no name whichever's it is."""
        end = len(self.schedule) if until is None else until
        return self.step < end and not self.failed and model in (None, self.model)

    def point(self) -> Point:
        """What the next step predicts from."""
        if self.step == self.switched and self.sampling.restart and self.step:
            self.schedule.restart(self.step)
        model_input = self.schedule.model_input(self.latents, self.step)
        return Point(model_input, self.schedule.timesteps[self.step], self.request)

    def decide(self) -> None:
        """Switch before the next step, where the rule says so."""
        if self.switched is None and self.sampling.switch.switches(self.distances, self.step, len(self.schedule)):
            self.switched = self.step

    def advance(self, prediction: Tensor, agree: Callable[[float], float] = float) -> None:
        """Take the next step. ``agree`` gives all ranks of the request one rank's distance, to decide alike.

        Once the switch is decided nobody waits for the device: ``settle`` reads what the steps came to. Raises
        ``UserError`` for a prediction of another shape than the latents.
        """
        if prediction.shape != self.latents.shape:  # some schedulers would broadcast it
            predicted = sizes_of(prediction.shape)
            raise other_latents_error(self.sampling, self.model, predicted, self.latents, self.request)
        distance = relative_distance(prediction, self.previous)
        self.previous = prediction
        advanced = self.schedule.advance(prediction, self.step, self.latents, self.generator)
        self.latents = advanced.to(self.latents.dtype)  # that of ``start``: what hands them on counts with it
        self.step += 1
        self.pending.append(torch.stack([distance.double(), torch.isfinite(self.latents).all().double()]))
        if self.switched is None:
            self.settle()
            self.distances[-1] = agree(self.distances[-1])
            self.decide()

    def settle(self) -> None:
        """Read distances, and whether latents were numbers, of all steps since the last time; waits for the device."""
        if not self.pending:
            return
        began = self.step - len(self.pending)
        figures = torch.stack(self.pending).tolist()
        self.pending.clear()
        for number, (distance, finite) in enumerate(figures, start=began + 1):
            self.distances.append(distance)
            if not finite:
                self.failed, self.step = True, number
                return


@torch.no_grad()
def run(
    loops: Sequence[Loop],
    predict: Predict,
    until: int | None = None,
    agree: Callable[[float], float] = float,
    model: str | None = None,
) -> None:
    """Take the steps of equal requests before ``until`` together, or all that are left; with ``model`` only its own."""
    while active := [loop for loop in loops if loop.takes(model, until)]:
        name = active[0].model
        together = [loop for loop in active if loop.model == name]
        predictions = predict(name, [loop.point() for loop in together])
        for loop, prediction in zip(together, predictions, strict=True):
            loop.advance(prediction, agree)
    for loop in loops:
        loop.settle()


def begin(sampling: Sampling, request: Request, device: torch.device | str = "cpu") -> Loop:
    """A request before its first step. Its noise is drawn on the CPU, by its seed alone."""
    schedule = sampling.schedule(request, device)
    generator = torch.Generator("cpu").manual_seed(request.seed)
    latents = sampling.sampler.noise(request, generator).to(device)
    least, most = sampling.bounds(schedule)
    loop = Loop(sampling, request, schedule, latents, generator, switched=most if least == most else None)
    loop.decide()
    return loop


def other_latents_error(sampling: Sampling, name: str, predicted: str, latents: Tensor, request: Request) -> UserError:
    """What a model gives for a request's latents is no prediction of them."""
    return user_error(
        f"the model `{name}` predicts {predicted} from latents {sizes_of(latents.shape)}",
        label=f"for request `{request.id}`",
        help="both models need the latent channels, strides and patches that `start` makes: take models of one latent "
        "space",
        span=sampling.sampler.span("models"),
    )


def sizes_of(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def relative_distance(prediction: Tensor, previous: Tensor | None) -> Tensor:
    """Scalar: relative L1 distance of a guided prediction from that of the step before; NaN for the first."""
    if previous is None:
        return torch.full((), math.nan, device=prediction.device)
    return (prediction - previous).abs().mean() / previous.abs().mean()


def guided(conditional: Tensor, unconditional: Tensor | None, scale: float) -> Tensor:
    """Classifier-free guidance (arXiv 2207.12598) in float32."""
    conditional = conditional.float()
    if unconditional is None:
        return conditional
    unconditional = unconditional.float()
    return unconditional + scale * (conditional - unconditional)


HEAD = 3  # step, K or -1, whether it has failed; the distances follow


def state_bytes(loop: Loop) -> int:
    """How many bytes the state of this request has."""
    latents = loop.latents
    sizes = (HEAD + len(loop.schedule)) * 8, loop.generator.get_state().nbytes, latents.nbytes, latents.numel() * 4
    return sum(sizes) + loop.sampling.longest_history(loop.request, latents) * latents.numel()


def packed(loop: Loop) -> Tensor:
    """uint8 ``[state_bytes]`` on the latents' device; nobody waits for it.

    The bytes of a request are as many at every step and at every outcome of its switch, so the receiver knows their
    number before anything is sent: a head, the generator, the latents, the last prediction, and room for the longest
    history.
    """
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
