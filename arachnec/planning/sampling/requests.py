"""Requests to a traced module, and to chains of cascades: encode, segments of each model, decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arachnec.cost.sparse_attention import with_sparse_layers
from arachnec.data.requests import Request
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cascade, Clip, Cluster, Level, Module, Phase, Stage, integer
from arachnec.ir.sampling import asked_branches, forecast_of, models_of, outcomes_of, segment_of, steps_taken
from arachnec.ir.sampling_rules import is_uncertain
from arachnec.ir.stage_sizes import is_encoder, most_clips
from arachnec.ir.state_placement import inference_bytes
from arachnec.ir.values import Attributes, Formula, Quantity, Term


@dataclass(frozen=True)
class Segment:
    """Steps that one model takes without a border; ``after`` is whether it is the second model."""

    first: int
    last: int
    after: bool = False

    @property
    def steps(self) -> tuple[int, int]:
        return self.first, self.last


def segments_of(clip: Clip, models: int, length: int, longest: int | None = None) -> Iterator[Segment]:
    """The chain of a request. ``longest`` limits the segments that are certain; None leaves them whole.

    A request whose switch comes when it comes has a window, [least, most] steps of the first model. Its first model
    surely takes the steps before ``least`` and its second those from ``most`` on. Over the window there are segments of
    both, of at most ``length`` steps each: those of the first model, then those of the second. At every outcome each
    step is taken once, because a segment behind the switch hands its input on, and so does one of the second model
    before it.
    """
    steps, outcomes = integer(clip.attrs["steps"]), outcomes_of(clip)
    if models == 1:
        yield from cut_steps(0, steps, longest or steps)
        return
    least, most = outcomes[0], outcomes[-1]
    yield from cut_steps(0, least, longest or steps)
    yield from cut_steps(least, most, length)
    yield from (replace(segment, after=True) for segment in cut_steps(least, most, length))
    yield from (replace(segment, after=True) for segment in cut_steps(most, steps, longest or steps))


def cut_steps(first: int, end: int, length: int) -> Iterator[Segment]:
    """The steps from ``first`` to before ``end`` in equal parts of at most ``length``, longer ones first."""
    count = -(-(end - first) // length)
    for part in range(count):
        begin = first + -(-(end - first) * part // count)
        yield Segment(begin, first + -(-(end - first) * (part + 1) // count) - 1)


def segmented(module: Module, *, length: int, longest: int | None = None, batch: int = 1, models: int = 2) -> Module:
    """The module at level ``partitioned``: a chain of cascades for every request, or for ``batch`` equal ones.

    Requests are batched where they are equal in shape, steps, branches and arrival, and their switch is certain.
    With ``models`` 1 the first one takes all steps. Raises UserError where a module has no requests.
    """
    demand_requests(module)
    if models == 1:
        module = of_first_model(module)
    names = models_of(module)
    cascades: list[Cascade] = []
    for group in batches(module.clips, batch_limit(module, batch)):
        cascades += chain(module, group, list(segments_of(group[0], len(names), length, longest)))
    return replace(module, level=Level.PARTITIONED, cascades=tuple(cascades))


def demand_requests(module: Module) -> None:
    """Raises UserError where it is not said which steps there are, or by which models."""
    asked = all("steps" in clip.attrs for clip in module.clips)
    told = all("steps" in cascade.attrs for cascade in module.cascades if cascade.phase is Phase.DENOISE)
    if not models_of(module) or not module.clips or not asked or not told:
        raise user_error(
            f"module @{module.name} has no requests and models to segment",
            help="give its clips `steps`, and the module `models`: the stages that denoise",
            span=module.span,
        )


def of_first_model(module: Module) -> Module:
    """The requests without a switch: their first model takes all steps, and the module has no other."""
    first, *others = models_of(module)
    clips = (
        replace(clip, attrs=clip.attrs.updated(window=None, forecast=None, branches=_first(clip)))
        for clip in module.clips
    )
    attrs = module.attrs.updated(models=(first,), switch=None)
    stages = tuple(stage for stage in module.stages if stage.name not in others)
    return replace(module, stages=stages, clips=tuple(clips), attrs=attrs)


def _first(clip: Clip) -> tuple[int, ...] | None:
    return (asked_branches(clip, 0),) if "branches" in clip.attrs else None


def batches(requests: Sequence[Clip], most: int) -> list[list[Clip]]:
    """Equal requests together, at most so many; those whose switch is uncertain alone."""
    groups: dict[tuple[object, ...], list[list[Clip]]] = {}
    for clip in requests:
        certain = len(outcomes_of(clip)) == 1
        own = () if certain else (clip.id,)
        same = tuple(clip.attrs.get(name) for name in ("steps", "branches", "window", "arrival"))
        rows = groups.setdefault((clip.frames, clip.height, clip.width, clip.text, clip.tokens, *same, *own), [[]])
        if len(rows[-1]) == most:
            rows.append([])
        rows[-1].append(clip)
    return sorted((group for rows in groups.values() for group in rows), key=lambda group: group[0].id)


def batched(module: Module, most: int) -> Module:
    """A segmented module with equal requests, each alone so far, in batches of at most so many."""
    second, clips = models_of(module)[1:], {clip.id: clip for clip in module.clips}
    own: dict[int, list[Cascade]] = {}
    for cascade in module.cascades:
        if len(cascade.clips) == 1:
            own.setdefault(cascade.clips[0], []).append(cascade)
    cascades = [cascade for cascade in module.cascades if len(cascade.clips) > 1]
    for group in batches([clips[number] for number in own], batch_limit(module, most)):
        first = own[group[0].id]
        segments = [Segment(*segment_of(c), after=c.stage in second) for c in first if c.phase is Phase.DENOISE]
        cascades += first if len(group) == 1 else chain(module, group, segments)
    return replace(module, cascades=tuple(cascades))


def batch_limit(module: Module, most: int) -> int:
    """How many requests a batch may have, as far as the models allow it."""
    limits = (most_clips(module.stage(name)) for name in models_of(module))
    return min([most, *(limit for limit in limits if limit is not None)])


@dataclass(frozen=True)
class Begun:
    """What is there of a chain already: the names of its captions' values and of its latents, and how many segments it
    has had."""

    encoded: tuple[str, ...]
    latents: tuple[str, ...]
    segments: int


def chain(
    module: Module, requests: Sequence[Clip], segments: Sequence[Segment], begun: Begun | None = None
) -> list[Cascade]:
    """The cascades of one request, or of equal ones: its encoders, its segments in order, its decoder.

    One that has ``begun`` goes on from there: its encoders have run. Of a costed module segments say which layers they
    run sparse.
    """
    models, decoder = models_of(module), module.attrs.get("decoder")
    clip, ids = requests[0], tuple(request.id for request in requests)

    def cascade(phase: Phase, name: str, stage: str, inputs: tuple[str, ...], attrs: Attributes) -> Cascade:
        return Cascade(name, phase, stage, ids, len(ids), clip.tokens, clip.text, inputs, attrs)

    encoders = [
        cascade(Phase.ENCODE, f"r{clip.id}.{stage.name}", stage.name, (), Attributes())
        for stage in module.stages
        if stage.name not in {*models, decoder} and is_encoder(stage) and begun is None
    ]
    begun = begun or Begun(tuple(encoder.name for encoder in encoders), (), 0)
    cascades, latents = list(encoders), begun.latents
    for number, segment in enumerate(segments, start=begun.segments):
        stage, name = models[segment.after], f"r{clip.id}.{number}"
        attrs = segment_attributes(module, clip, segment)
        cascades.append(cascade(Phase.DENOISE, name, stage, (*begun.encoded, *latents), attrs))
        latents = (name,)
    if isinstance(decoder, str):
        cascades.append(cascade(Phase.DECODE, f"r{clip.id}.{decoder}", decoder, latents, Attributes()))
    return list(with_sparse_layers(cascades, module.stages))


def begun_before(module: Module, cascades: Sequence[Cascade]) -> Begun | None:
    """What a chain without its beginning goes on from; None for a whole one."""
    own, first = {cascade.name for cascade in cascades}, cascades[0]
    if not any(name not in own for name in first.inputs):
        return None
    phases = {cascade.name: cascade.phase for cascade in module.cascades}
    encoded = tuple(name for name in first.inputs if phases[name] is Phase.ENCODE)
    number = int(first.name.rpartition(".")[2]) if first.phase is Phase.DENOISE else 0
    return Begun(encoded, first.inputs[len(encoded) :], number)


def segment_attributes(module: Module, clip: Clip, segment: Segment) -> Attributes:
    """What a segment of a request says: its steps, its branches, and the switch where that decides which it takes."""
    branches = asked_branches(clip, int(segment.after))
    taken = len(steps_taken(segment.steps, segment.after, forecast_of(clip)))
    return Attributes.of(
        steps=segment.steps,
        branches=branches if branches > 1 else None,
        switch=module.attrs.get("switch") if is_uncertain(segment.steps, clip) else None,
        planned=taken if taken < segment.last - segment.first + 1 else None,
    )


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
