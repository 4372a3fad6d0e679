"""A small model, clips and plans written by hand, for the tests of the executor."""

from __future__ import annotations

import contextlib
import inspect
import math
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cascade, Clip, Cluster, Level, Module, Phase, Reduce, Stage, Step
from arachnec.ir.tables import STAGE
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value
from arachnec.lowering.programs import lower
from arachnec.models.batch import clip_generator
from arachnec.models.file import ModelFile, load_model_file
from arachnec.passes.check import checked
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.tracing import blocks, sample
from arachnec.tracing.captured import CapturedModel
from arachnec.tracing.record import ExampleCall
from tests.distributed.harness import PRELOAD, run_ranks
from tests.distributed.rank_device import rank_device
from tests.warm_python import warm_python

RUNS = (
    *PRELOAD,
    "tests.warm_export",
    "arachnec.backends.torch_distributed.local_run",
    "arachnec.passes",
    "scipy.optimize",
    "z3",
)

# The default, but for the time of its search: what these tests hold does not depend on how good a plan is.
QUICK = PIPELINES["default"].replace("schedule-z3", "schedule-z3{steps=20}")

BLOCK = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads, wide):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x, time):
        b, s, c = x.shape
        q, k, v = self.qkv(self.norm(x) * (1 + time[:, None])).view(b, s, 3, self.heads, c // self.heads).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(y.transpose(1, 2).reshape(b, s, c))
        return x + self.mlp(x)
"""
SAMPLE = """

def sample(clip, generator):
    s = tokens(clip)
    clean = clip.encoded["vae"] if "vae" in clip.encoded else torch.ones(1, s, 4)
    noise = torch.randn(clean.shape, generator=generator)
    time = torch.rand(1, generator=generator)
    return {"x": clean + time * noise, "time": time}, noise


def tokens(clip):
    return clip.frames * (clip.height // 8) * (clip.width // 8)
"""
TINY = """

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 12)
        self.time = nn.Linear(1, 12)
        self.blocks = nn.ModuleList([Block(12, 3, 24) for _ in range(2)])
        self.head = nn.Linear(12, 4)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, time):
        t = self.time(time[:, None].to(x.dtype))
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x)


def build():
    return Tiny()


def loss(prediction, target):
    return nn.functional.mse_loss(prediction.float(), target)
"""
MODEL = BLOCK + SAMPLE + TINY
FOUR_BLOCKS = MODEL.replace("range(2)", "range(4)")

DOUBLE = """

def build():
    return Tiny().double()


def sample(clip, generator):
    s = tokens(clip)
    noise = torch.randn(1, s, 4, generator=generator, dtype=torch.float64)
    time = torch.rand(1, generator=generator, dtype=torch.float64)
    return {"x": torch.ones(1, s, 4, dtype=torch.float64) + time * noise, "time": time}, noise


def loss(prediction, target):
    return nn.functional.mse_loss(prediction, target)
"""
ADAPTERS = (
    DOUBLE
    + """

def build():
    model = Tiny().double()
    for name, value in model.named_parameters():
        value.requires_grad_(name.startswith("blocks.1.out") or name == "blocks.0.norm.weight")
    return model
"""
)
TIED = (
    DOUBLE
    + """

def build():
    model = Tiny().double()
    model.blocks[1].out.weight = model.blocks[0].out.weight
    return model
"""
)

ENCODER = """

class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(2, 4)

    def load(self, clip, device):
        values = torch.linspace(0, 1 + clip.start, 2 * tokens(clip), device=device)
        return values.view(1, -1, 2)

    def forward(self, x):
        return torch.sin(self.project(x))


def encoders():
    return {"vae": Vae()}
"""


@dataclass(frozen=True)
class Work:
    """A cascade of a plan: its clips, ranks, and place in the order."""

    clips: tuple[int, ...]
    ranks: tuple[int, ...]
    start: float
    stage: str = "dit"
    inputs: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Value], ...] = ()


def clip(id: int | str, frames: int, height: int = 16, width: int = 16, start: int = 0) -> VideoClip:
    return VideoClip(id, frames, height, width, 0, start=start)


def tokens(clip: VideoClip) -> int:
    return clip.frames * (clip.height // 8) * (clip.width // 8)


def cluster(world: int) -> Cluster:
    return Cluster(
        "here",
        Attributes.of(
            nodes=1,
            gpus=world,
            device="cpu",
            memory=Quantity(4.0, "GiB"),
            flops=Quantity(0.05, "TFLOP/s"),
            intra=Quantity(5.0, "GB/s"),
            inter=Quantity(5.0, "GB/s"),
            latency=Quantity(20.0, "us"),
            inter_latency=Quantity(20.0, "us"),
        ),
    )


def traced(world: int, iterations: Sequence[Sequence[VideoClip]], *, encoder: bool = False) -> Module:
    """The traced module of all iterations, as the front end would make it."""
    small = Quantity(1e-3, "GiB")
    per_token = Term(1e-6, (("B", 1), ("S", 1)))
    flops = Formula((per_token, Term(1e-9, (("B", 1), ("S", 2)))), "TFLOP")
    saved = Formula((per_token,), "GiB")
    encoder_attrs = Attributes.of(params=12, dtype="f32", flops=flops, output=small)
    stages = [Stage("vae", False, encoder_attrs)] if encoder else []
    dit = Attributes.of(
        params=3000, dtype="f32", hidden=12, heads=3, attentions=2, joint=False,
        flops=flops, saved=saved, saved_recompute=saved, workspace=saved, traffic=saved, state=small,
    )  # fmt: skip
    clips = [
        Clip(0, c.frames, c.height, c.width, c.text_tokens, tokens(c), Attributes.of(name=str(c.id), iteration=number))
        for number, batch in enumerate(iterations)
        for c in batch
    ]
    numbered = tuple(replace(c, id=i) for i, c in enumerate(clips))
    return Module("manifest", Level.TRACED, cluster(world), numbered, (*stages, Stage("dit", True, dit)))


def lowered(source: Module, works: Sequence[Work]) -> Module:
    """A plan written by hand, one cascade per ``Work``, lowered. The k-th is named ``c<k>`` and takes 1 ms."""
    of_id = {c.id: c for c in source.clips}
    cascades = tuple(_cascade(f"c{k}", work, of_id) for k, work in enumerate(works))
    used = {clip for work in works for clip in work.clips}
    trained = tuple(c.name for c in cascades if c.phase is Phase.TRAIN)
    ms = Formula((Term(0.1, (("B", 1), ("S", 1))), Term(0.1)), "ms")
    stages = tuple(
        Stage(s.name, s.trained, s.attrs.updated(forward=ms, backward=ms if s.trained else None, costs="profile"))
        for s in source.stages
    )
    module = Module(
        "by_hand",
        Level.PLACED,
        source.cluster,
        tuple(Clip(c.id, c.frames, c.height, c.width, c.text, c.tokens) for c in source.clips if c.id in used),
        stages,
        (),
        cascades,
        (Reduce("dit", trained),),
        (Step("dit"),),
        (),
        Attributes.of(makespan=Quantity(max(c.end for c in cascades), "ms"), bound=Quantity(1.0, "ms"), proved=False),
    )
    return lower(module)


def _cascade(name: str, work: Work, of_id: dict[int, Clip]) -> Cascade:
    first = of_id[work.clips[0]]
    degree = len(work.ranks)
    attrs = Attributes.of(
        degree=degree,
        start=Quantity(work.start, "ms"),
        end=Quantity(work.start + 1.0, "ms"),
        memory=Quantity(2e-3, "GiB"),
        ranks=work.ranks,
        ulysses=degree if degree > 1 else None,
        ring=1 if degree > 1 else None,
    )
    attrs = attrs.updated(**dict(work.attrs))
    phase = Phase.TRAIN if work.stage == "dit" else Phase.ENCODE
    return Cascade(name, phase, work.stage, work.clips, len(work.clips), first.tokens, first.text, work.inputs, attrs)


def as_planned(model: Module, program: Module) -> Module:
    """The traced module with the stages of a program that a test has changed, without what planning adds to them."""
    stages = tuple(
        replace(
            stage, attrs=stage.attrs.updated(**{name: None for name, row in STAGE.items() if row.since > model.level})
        )
        for stage in program.stages
    )
    return replace(model, stages=stages)


def executable(
    folder: Path,
    iterations: Sequence[Sequence[VideoClip]],
    works: Sequence[Work],
    world: int,
    *,
    encoder: bool = False,
    training: Training | None = None,
    pipeline: str = QUICK,
    more: str = "",
) -> Path:
    """An executable folder whose iteration 0 runs ``works``. ``more`` is code at the end of the model file."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.py"
    source.write_text(MODEL + (ENCODER if encoder else "") + more)
    module = traced(world, iterations, encoder=encoder)
    return write_executable(
        folder,
        program=lowered(module, works),
        traced=module,
        pipeline=pipeline,
        model_file=load_model_file(source),
        clips=[c for batch in iterations for c in batch],
        training=training,
    )


def proved_executable(
    folder: Path,
    module: Module,
    works: Sequence[Work],
    clips: Sequence[VideoClip],
    *,
    training: Training | None = None,
    more: str = "",
) -> Path:
    """An executable of a traced module that a test has changed, whose program of ``works`` is checked."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.py"
    source.write_text(MODEL + more)
    return write_executable(
        folder,
        program=checked(lowered(module, works)),
        traced=module,
        pipeline="default",
        model_file=load_model_file(source),
        clips=list(clips),
        training=training,
    )


def run(folder: Path, *arguments: str | Path, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    """``arachnec run`` in a process of its own, and so are its ranks. ``tests/equivalence`` executes programs first."""
    command = [warm_python(RUNS), "-m", "arachnec.cli", "run", str(folder), "--no-equivalence", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


_CAPTURED: dict[Hashable, CapturedModel] = {}
_EXAMPLES: dict[Hashable, list[ExampleCall]] = {}
_MEASURED: dict[Hashable, Stage] = {}


@contextlib.contextmanager
def captured_once() -> Iterator[None]:
    """A rank keeps what it captures for later tests with the same classes, weights and examples, the examples that it
    found for a model file and captions of these lengths, and its costs.

    ``tests.distributed.preloaded`` has captured the models above before the ranks are forked. Ranks that
    ``arachnec run`` starts capture for themselves.
    """
    # not imported for this: it imports Triton, which reads its environment when it is
    trace = sys.modules.get("arachnec.passes.trace")
    capture, measure = blocks.capture_blocks, getattr(trace, "trained_stage", None)
    find = sample.example_calls

    def kept(
        model: nn.Module,
        examples: Sequence[ExampleCall],
        *,
        at: Sequence[ExampleCall] = (),
        verify: bool = True,
        gradients: bool = True,
        reporter: Reporter = unreported,
    ) -> CapturedModel:
        written = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
        sources = frozenset(map(inspect.getsource, written))
        weights = tuple(
            (name, w.shape, w.dtype, w.device.type, w.requires_grad) for name, w in model.named_parameters()
        )
        calls = tuple(
            (call.clip, call.batch, call.text, *map(_form, call.arguments.items())) for call in [*examples, *at]
        )
        key = (sources, weights, calls, len(at), gradients)
        if (key, True) not in _CAPTURED and (key, verify) not in _CAPTURED:
            _CAPTURED[key, verify] = capture(
                model, examples, at=at, verify=verify, gradients=gradients, reporter=reporter
            )
        return _CAPTURED[key, (key, True) in _CAPTURED]

    def tried(model: nn.Module, source: Any, clips: Sequence[VideoClip], *given: Any, most: int | None = None) -> Any:
        file = getattr(source, "model_file", source)
        if given or not clips or not isinstance(file, ModelFile):
            return find(model, source, clips, *given, most=most)
        of_model = file.path.read_text(), frozenset((w.dtype, w.device.type) for w in model.parameters())
        of_source = getattr(source, "dtype", None), source.encoders is None, frozenset(c.text_tokens for c in clips)
        key = (*of_model, *of_source, most)
        if key not in _EXAMPLES:
            calls = find(model, source, clips, most=most)
            if calls[0].clip != sample.SMALL[0]:  # the clips' own sizes
                return calls
            _EXAMPLES[key] = calls
        return _EXAMPLES[key]

    def measured(
        name: str, model: nn.Module, captured: CapturedModel, calls: Sequence[ExampleCall], **options: Any
    ) -> Stage:
        key = (name, captured, *options.items())
        if key not in _MEASURED:
            assert measure is not None
            _MEASURED[key] = measure(name, model, captured, calls, **options)
        return _MEASURED[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "capture_blocks", kept)
        patch.setattr(sample, "example_calls", tried)
        if trace is not None:
            patch.setattr(trace, "trained_stage", measured)
        yield


def _form(argument: tuple[str, Any]) -> Hashable:
    name, value = argument
    return (name, value.shape, value.dtype) if isinstance(value, torch.Tensor) else (name, repr(value))


def train_on(ranks: int, folder: Path, **options: object) -> dict[str, Any]:
    """The executor without its launcher, on ranks that are there already; the report."""
    run_ranks(ranks, train, folder, RunOptions(**options))  # type: ignore[arg-type]
    place = options.get("report") or folder / "run.json"
    assert isinstance(place, Path)
    return msgspec.json.decode(place.read_bytes())


def train(folder: Path, options: RunOptions) -> None:
    """What each rank does."""
    from arachnec.backends.torch_distributed import engine
    from arachnec.executable.folder import read_executable

    with captured_once():
        engine.train(read_executable(folder), options, rank_device())


def plain_loop(
    folder: Path, clips: Sequence[VideoClip], *, seed: int = 0, step: int = 0, model: nn.Module | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The objective and its gradients, written without anything of the executor: one clip at a time.

    Of a ``model`` in training, else of the one that the seed gives.
    """
    model_file = load_model_file(folder / "model.py")
    torch.manual_seed(seed)
    model = model or model_file.build()
    torch.manual_seed(seed)
    encoders = model_file.encoders() if model_file.encoders else {}
    total = 0.0
    for clip_shape in clips:
        with torch.no_grad():
            encoded = {name: encoder(encoder.load(clip_shape, "cpu")) for name, encoder in encoders.items()}
        given = replace(clip_shape, encoded=encoded)
        kwargs, target = model_file.sample(given, clip_generator(seed, step, clip_shape.id))
        loss = model_file.loss(model(**kwargs), target) / len(clips)
        loss.backward()
        total += float(loss.detach())
    return total, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def assert_same_gradients(saved: Path, expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """Every tensor within ``tolerance`` of its own norm, or of a thousandth of the whole gradient's norm."""
    gradients = load_file(saved)
    assert set(gradients) == set(expected)
    whole = math.sqrt(sum(float(value.double().norm()) ** 2 for value in expected.values()))
    for name, value in expected.items():
        limit = tolerance * max(float(value.double().norm()), 1e-3 * whole)
        assert float((gradients[name].double() - value.double()).norm()) <= limit, name


def losses(report: Path) -> list[float]:
    return [step["loss"] for step in msgspec.json.decode(report.read_bytes())["steps"]]
