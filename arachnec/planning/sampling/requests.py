"""Requests as a traced module. In: requests, the stages that sample them, and what is known of each switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from arachnec.data.requests import Request
from arachnec.ir.nodes import Clip, Cluster, Level, Module, Stage
from arachnec.ir.state_placement import inference_bytes
from arachnec.ir.values import Attributes, Formula, Quantity, Term

GIB = 2**30


@dataclass(frozen=True)
class SwitchForecast:
    """How many steps of a request its first model takes: at least, at most, and as is planned for."""

    least: int
    most: int
    forecast: int

    @staticmethod
    def fixed(steps: int) -> SwitchForecast:
        return SwitchForecast(steps, steps, steps)


def guided(model: str, request: Request) -> int:
    """Predictions of one step: with guidance a second one, without the text."""
    return 2 if request.guidance > 1 else 1


def sampling_module(
    requests: Sequence[Request],
    tokens: Callable[[Request], int],
    stages: Sequence[Stage],
    models: Sequence[str],
    cluster: Cluster,
    *,
    switch: str | None = None,
    forecasts: Sequence[SwitchForecast] = (),
    decoder: str | None = None,
    branches: Callable[[str, Request], int] = guided,
) -> Module:
    """The requests as a module at level ``traced``; a request's id in the IR is its position.

    ``tokens`` counts S of a request. ``models`` name one or two of the ``stages``, the first to denoise first.
    ``forecasts`` are one a request where there are two; else the first model takes all steps. ``switch`` is the rule's
    text, as on the command line. ``branches`` counts the predictions of one step of a model.
    """
    clips = []
    for number, request in enumerate(requests):
        known = forecasts[number] if forecasts else None
        attrs = Attributes.of(
            name=str(request.id),
            steps=request.steps,
            branches=tuple(branches(name, request) for name in models),
            window=(known.least, known.most) if known else None,
            forecast=known.forecast if known and known.least < known.most else None,
            arrival=Quantity(request.arrival * 1e3, "ms") if request.arrival else None,
        )
        sizes = request.frames, request.height, request.width, request.text_tokens, tokens(request)
        clips.append(Clip(number, *sizes, attrs))
    attrs = Attributes.of(models=tuple(models), switch=switch, decoder=decoder)
    return Module("requests", Level.TRACED, cluster, tuple(clips), tuple(stages), attrs=attrs)


def inference_stage(stage: Stage, latent_bytes: float, *, kept: int = 0) -> Stage:
    """A traced model as it samples: frozen, its state the parameters alone, nothing kept for a backward.

    ``latent_bytes`` are those of one token's latents. A scheduler with memory hands on ``kept`` tensors more of that
    size: its past predictions. ``workspace`` is that of a forward that keeps nothing, as traced.
    """
    attrs = stage.attrs
    state = inference_bytes(stage) / GIB
    left: Mapping[str, None] = dict.fromkeys(TRAINING)
    attrs = attrs.updated(
        **{
            **left,
            "state": Quantity(state, "GiB"),
            "output": Formula((Term((1 + kept) * latent_bytes / GIB, (("B", 1), ("S", 1))),), "GiB"),
        }
    )
    return Stage(stage.name, False, attrs, stage.span)


# What a stage says of its training.
TRAINING = (
    "trained", "saved", "saved_recompute", "spared", "recomputing", "head", "gradients", "cuts",
    "tensors", "tensor_kinds", "outside", "unsharded",
    "host_state", "host_inputs", "tied", "end_saved", "block_saved", "block_inputs", "block_shared",
)  # fmt: skip
