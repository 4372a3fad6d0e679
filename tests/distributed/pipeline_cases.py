"""A model that is hard to cut, in float64, and its plans as pipelines, for the tests of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from arachnec.data.clip import VideoClip
from arachnec.driver import plan_iteration, plan_model
from arachnec.executable.folder import write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Stage
from arachnec.ir.stage_sizes import layers_of
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term
from arachnec.models.file import load_model_file
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import BLOCK, SAMPLE, cluster, tokens

# Four blocks in two classes, a stream beside the tokens, a skip connection over two blocks, a weight that embedding
# and head share, a table that no module owns, a parameter that nothing uses.
HARD = """

class Hard(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 12)
        self.time = nn.Sequential(nn.Linear(1, 12), nn.SiLU())
        self.first = nn.ModuleList([Block(12, 3, 24) for _ in range(2)])
        self.second = nn.ModuleList([Block(12, 3, 36) for _ in range(2)])
        self.table = nn.Parameter(torch.randn(1, 1, 12))
        self.head = nn.LayerNorm(12)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, time):
        t = self.time(time[:, None].to(self.table.dtype))
        x = self.embed(x.to(self.table.dtype))
        positions = torch.linspace(0, 1, x.shape[1], dtype=x.dtype, device=x.device)
        skip = x = x + positions[None, :, None]
        for block in self.first:
            x = block(x, t)
        x = x + self.table * skip
        for block in self.second:
            x = block(x, t)
        return nn.functional.linear(self.head(x + self.table * t[:, None]), self.embed.weight.t())


def build():
    return Hard().double()


def loss(prediction, target):
    return nn.functional.mse_loss(prediction, target.to(prediction.dtype))
"""
MODEL = BLOCK + SAMPLE + HARD
FROZEN = """

def build():
    model = Hard().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("second"))
    return model
"""
ADAPTED = """

def build():
    model = Hard().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".out." in name)
    return model
"""


TFLOP = Formula((Term(1e-6, (("B", 1), ("S", 1))), Term(1e-8, (("B", 1), ("S", 2)))), "TFLOP")
GIB = Formula((Term(1e-6, (("B", 1), ("S", 1))),), "GiB")


def figures(classes: Mapping[str, Sequence[str]], gib: Formula = GIB) -> Attributes:
    """What ``trace`` says of the parts of a stage, made up: the paths of each block class, in order."""
    paths = [path for members in classes.values() for path in members]
    numbers = tuple(number for number, members in enumerate(classes.values()) for _ in members)
    per_class = (gib,) * len(classes)
    return Attributes.of(
        layers=tuple((path, 1000) for path in paths), layer_params=(1000,) * len(paths), classes=numbers,
        blocks=tuple((Symbol(name), len(members)) for name, members in classes.items()),
        block_flops=(TFLOP,) * len(classes), block_saved=per_class, block_inputs=per_class, block_shared=per_class,
        block_workspace=per_class, block_traffic=per_class, block_attentions=(1,) * len(classes),
        block_heads=(3,) * len(classes), end_params=((84, 84), (24, 24)), end_flops=(TFLOP, TFLOP),
        end_saved=(gib, gib), cuts=((len(paths) - 1, gib),),
        token_cuts=((len(paths) - 1, gib),),
    )  # fmt: skip


def traced(world: int, iterations: Sequence[Sequence[VideoClip]], *, encoder: bool = False, blocks: int = 2) -> Module:
    """The traced module, its figures made up: ``tests/tracing`` holds those of ``trace``. ``blocks`` are of a class."""
    small = Quantity(1e-3, "GiB")
    stages = [Stage("vae", False, Attributes.of(params=12, dtype="f32", flops=TFLOP, output=small))] if encoder else []
    paths = {
        name: tuple(f"{of}.{n}" for n in range(blocks)) for name, of in (("Block", "first"), ("Block_2", "second"))
    }
    last = 2 * blocks - 1
    attrs = figures(paths).updated(
        params=108 + 2000 * blocks, dtype="f64", hidden=12, heads=3, attentions=2 * blocks, joint=False,
        flops=TFLOP, saved=GIB, saved_recompute=GIB, workspace=GIB, traffic=GIB, state=small,
        optimizer=Quantity(5e-4, "GiB"), tied_layers=(((0, last), 48), ((blocks, last), 12)),
    )  # fmt: skip
    of_host = cluster(world)
    of_host = replace(of_host, attrs=of_host.attrs.updated(host_memory=Quantity(1.0, "GiB")))
    clips = [
        Clip(number, c.frames, c.height, c.width, c.text_tokens, tokens(c), Attributes.of(name=str(c.id), iteration=i))
        for number, (i, c) in enumerate((i, c) for i, batch in enumerate(iterations) for c in batch)
    ]
    return Module("manifest", Level.TRACED, of_host, tuple(clips), (*stages, Stage("dit", True, attrs)))


def partly_trained(stage: Stage, paths: Sequence[str]) -> Stage:
    """The stage where only layers train whose path begins so."""
    layers = [(path, count if path.startswith(tuple(paths)) else 0) for path, count in layers_of(stage)]
    trained = sum(count for _, count in layers)
    ends = ((84, 0), (24, 0))
    return replace(
        stage, attrs=stage.attrs.updated(layers=tuple(layers), end_params=ends, trained=trained, tied_layers=None)
    )


def pipeline_of(stages: str, schedule: str, policy: str = "single", cell: int | str = 1, host: str = "none") -> str:
    """The passes that train in ``stages`` by a ``schedule``: every layer's gradients in a bucket of their own. ``host``
    is what lies in host memory."""
    return (
        f"stages{{{stages}}},shard-parameters{{cell={cell}}},shard-optimizer,"
        f"offload{{what={host}}},partition{{policy={policy}}},annotate,schedule-pipeline{{{schedule}}},"
        "bucket{mib=0},lower,check"
    )


def planned(world: int, batch: Sequence[VideoClip], passes: str, *, encoder: bool = False) -> Module:
    """The lowered and checked program of one iteration."""
    pipeline = Pipeline.parse(passes)
    model, _ = plan_model(traced(world, [batch], encoder=encoder), pipeline)
    return plan_iteration(model, pipeline, 0)[0]


def executable(
    folder: Path,
    world: int,
    iterations: Sequence[Sequence[VideoClip]],
    passes: str,
    *,
    encoder: bool = False,
    blocks: int = 2,
    more: str = "",
    trained: Sequence[str] | None = None,
    training: Training | None = None,
    crowded: bool = False,
    change: Callable[[Cascade], Cascade] | None = None,
) -> Path:
    """An executable folder of the hard model by these passes.

    ``blocks`` are of each of two classes; ``more`` is code at the end of the model file; with ``trained`` only layers
    of these paths train; ``crowded`` are devices on which two copies of the optimizer's state do not fit. ``change`` is
    made to every placed cascade.
    """
    from tests.distributed.executor_cases import ENCODER

    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "source.py"
    model_text = MODEL.replace("in range(2)", f"in range({blocks})")
    source.write_text(model_text + (ENCODER if encoder else "") + more)
    module = traced(world, iterations, encoder=encoder, blocks=blocks)
    if trained is not None:
        module = replace(module, stages=(*module.stages[:-1], partly_trained(module.stages[-1], trained)))
    if crowded:
        large = module.stages[-1].attrs.updated(state=Quantity(6.0, "GiB"), optimizer=Quantity(4.0, "GiB"))
        module = replace(module, stages=(*module.stages[:-1], replace(module.stages[-1], attrs=large)))
    pipeline = Pipeline.parse(passes)
    model, _ = plan_model(module, pipeline)
    return write_executable(
        folder,
        program=_iteration(model, pipeline, change),
        traced=module,
        model=model,
        pipeline=passes,
        model_file=load_model_file(source),
        clips=[c for batch in iterations for c in batch],
        training=training or Training(clip_norm=0.0),
    )


def _iteration(model: Module, pipeline: Pipeline, change: Callable[[Cascade], Cascade] | None) -> Module:
    if change is None:
        return plan_iteration(model, pipeline, 0)[0]
    *plan, lower, check = pipeline.passes
    placed = plan_iteration(model, Pipeline(tuple(plan)), 0)[0]
    return Pipeline((lower, check)).run(replace(placed, cascades=tuple(map(change, placed.cascades))))
