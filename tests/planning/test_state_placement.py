"""What a plan says that a rank holds is what it does hold, to the byte: parameters, gradients, optimizer, buffers.

Each rank of a small run is set up in this process with the code of a run, its collectives faked: shards, gradients as a
step has them, an update. Every tensor is counted once. Stand-ins for parameters of other ranks have no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from arachnec.analysis.stage_ranks import resident_gib
from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.weights import dealt_out_model as dealt
from arachnec.cluster.file import parse_cluster
from arachnec.executable.training_options import Training
from arachnec.ir.host_placement import layers_in_host, optimizer_in_host
from arachnec.ir.nodes import Level, Module, Stage, integer, quantity
from arachnec.ir.parameter_cells import cell_of, replicas
from arachnec.ir.parser import parse_module
from arachnec.ir.stage_sizes import layers_of
from arachnec.ir.state_placement import GIB, place, with_kept
from arachnec.ir.tables import FIGURES
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Value
from arachnec.model_state.cells.flat_layer import FlatLayer
from arachnec.model_state.kept_gradients import gradient_dtype, gradient_of, keep_gradients, set_gradient
from arachnec.model_state.optimizer import Optimizer
from arachnec.optimizers.recipe import recipe_of
from arachnec.passes.shard_optimizer import ShardOptimizer
from arachnec.passes.shard_parameters import ShardParameters
from arachnec.passes.stages import Stages
from arachnec.planning.host_choice import with_host
from arachnec.planning.stage_cuts import parts_of
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.host_copies import HostCopies, HostMasters
from arachnec.tracing.cost import readers_of
from arachnec.tracing.dataflow import Cut, Dataflow, record_dataflow, single_blocks
from arachnec.tracing.layers import ADAMW, layer_of_parameters, tensor_sizes

CPU, WIDTH, BLOCKS = torch.device("cpu"), 5, 4
PATHS = tuple(f"blocks.{number}" for number in range(BLOCKS))
WORLD = "2x4:cpu"
WAN = Path(__file__).parents[2] / "benchmarks" / "data" / "wan2_1_14b.cascade"


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        return x + self.down(self.up(y)) * self.scale.mean().to(x.dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(7 if number % 2 else 3) for number in range(BLOCKS)])
        self.middle = nn.Linear(WIDTH, WIDTH)  # between blocks 1 and 2
        self.head = nn.Linear(WIDTH, WIDTH)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            x = self.middle(x) if number == 1 else x
        return self.head(x)


TIES: dict[str, Callable[[Model], None]] = {
    "none": lambda model: None,
    "embedding and head": lambda model: setattr(model.head, "weight", model.embed.weight),
    "two blocks": lambda model: setattr(model.blocks[3].up, "weight", model.blocks[1].up.weight),
    "neighbours": lambda model: setattr(model.blocks[2].norm, "weight", model.blocks[1].norm.weight),
    "middle and head": lambda model: setattr(model.head, "weight", model.middle.weight),
}


@dataclass(frozen=True)
class Case:
    tie: str = "none"
    low: bool = False  # in bf16
    exact_norms: bool = False  # but for norms
    low_gradients: bool = False
    frozen: str = ""  # what begins so does not train
    adapters: bool = False  # only what `up` and the head have of biases trains
    ema: bool = False
    cell: int = 1
    spread: bool = False
    host: str = "none"
    cuts: tuple[int, ...] = ()
    stages_each: int = 1
    order: tuple[str, ...] = ("cells", "optimizer", "stages", "host")

    def model(self) -> Model:
        torch.manual_seed(0)
        model = Model()
        TIES[self.tie](model)
        if self.low:
            model = model.to(torch.bfloat16)
        if self.exact_norms:
            for block in model.blocks:
                block.norm.float()
            TIES[self.tie](model)
        for name, value in model.named_parameters():
            adapter = name.endswith("up.bias") or name == "head.bias"
            value.requires_grad_(adapter if self.adapters else not (self.frozen and name.startswith(self.frozen)))
        return model

    def module(self) -> Module:
        """The model's stage, its state placed by the passes in their order."""
        model = self.model()
        cluster = parse_cluster(WORLD)
        stage = stage_of(model, "bf16" if self.low_gradients and self.low else None)
        if self.ema:
            stage = with_kept(stage, ADAMW[0] + 4, ADAMW[1])
        module = Module("m", Level.TRACED, cluster, (), (stage,))
        for step in self.order:
            stages = [stage for stage in module.stages if "part_of" in stage.attrs]
            stages_on_a_rank = self.stages_each if stages else 1
            if step == "cells" and self.cell > 1:
                module = ShardParameters(cell=str(self.cell), stages_each=stages_on_a_rank).run(module)
            if step == "optimizer" and self.spread:
                module = crowded(module, ShardOptimizer(stages_each=stages_on_a_rank).run)
            if step == "stages" and self.cuts:
                module = Stages(cuts=self.cuts).run(module)
            if step == "host" and self.host != "none":
                module = with_host(module, self.host)
        return module


def crowded(module: Module, run: Callable[[Module], Module]) -> Module:
    """A pass on a cluster whose devices are small."""
    assert module.cluster is not None
    small = replace(module.cluster, attrs=module.cluster.attrs.updated(memory=Quantity(1e-9, "GiB")))
    return replace(run(replace(module, cluster=small)), cluster=module.cluster)


def stage_of(model: nn.Module, gradients: str | None) -> Stage:
    flow = flow_of(model)
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    numbers = layer_of_parameters(model, PATHS)
    sizes = dict(model.named_parameters())
    counts = [sum(sizes[n].numel() for n, layer in numbers.items() if layer == own) for own in range(BLOCKS)]
    nothing = {name: (Formula((), "TFLOP" if "flops" in name else "GiB"),) for name in FIGURES if "block" in name}
    figures: dict[str, Value] = {
        **nothing,
        "blocks": ((Symbol("Block"), BLOCKS),),
        "classes": (0,) * BLOCKS,
        "layer_params": tuple(sum(p.numel() for p in model.get_submodule(path).parameters()) for path in PATHS),
        "block_attentions": (0,),
        "block_heads": (1,),
        "end_params": ((0, 0), (0, 0)),
        "end_flops": (Formula((), "TFLOP"),) * 2,
        "end_saved": (Formula((), "GiB"),) * 2,
        "cuts": ((BLOCKS - 1, Formula((), "GiB")),),
    }
    attrs = Attributes.of(
        params=sum(p.numel() for p in parameters),
        trained=trained,
        dtype="f32" if parameters[0].dtype == torch.float32 else "bf16",
        layers=tuple(zip(PATHS, counts, strict=True)),
        state=Quantity(0.0, "GiB"),
        optimizer=Quantity(0.0, "GiB"),
        gradients=gradients,
        **figures,
        **tensor_sizes(model, PATHS, readers_of(Cut(flow, single_blocks(PATHS)))),
    )
    return place(Stage("dit", True, attrs))


def flow_of(model: nn.Module) -> Dataflow:
    arguments = {"x": torch.ones(1, 2, WIDTH, dtype=next(model.parameters()).dtype)}
    return record_dataflow(model, PATHS, arguments, lambda prediction: prediction)


@dataclass(frozen=True)
class Cuts:
    """As much of a cut model as a rank of a pipeline asks for."""

    model: nn.Module
    parts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Whole:
    value: Tensor

    def piece(self, start: int, size: int) -> Tensor:
        return self.value.detach().reshape(-1)[start : start + size]

    def whole(self) -> Tensor:
        return self.value.detach().clone()


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage_places(module: Module, case: Case) -> dict[str, tuple[int, ...]]:
    assert module.cluster is not None
    parts = [stage.name for stage in module.stages if "part_of" in stage.attrs]
    if not parts:
        return {stage.name: tuple(range(module.cluster.world)) for stage in module.stages}
    runs = len(parts) // case.stages_each
    size = module.cluster.world // runs
    return {name: tuple(range(n % runs * size, (n % runs + 1) * size)) for n, name in enumerate(parts)}


def rank_bytes(module: Module, case: Case, places: Mapping[str, tuple[int, ...]], rank: int) -> tuple[int, int]:
    """Bytes that a rank holds on its device, and in its host: after the backward of its step and in its update."""
    model, training = case.model(), Training(dtype="bf16" if case.low else "fp32", ema=0.9 if case.ema else 0.0)
    stages, runtime = list(module.stages), DeviceRuntime.of(CPU)
    pipeline = pipeline_rank(module, model, places, rank) if case.cuts else None
    stage = stages[0]
    if pipeline is not None:
        cut, own = pipeline.dealt_out, pipeline.own
    else:
        own = None
        paths = tuple(path for path, _ in layers_of(stage))
        whole = dealt.DealtStage("dit", paths, None, places["dit"], cell_of(stage) or 1, layers_in_host(stage))
        cut = (whole,) if cell_of(stage) else ()
    copies = HostCopies(runtime) if any("host" in stage.attrs for stage in stages) else None
    streamed = dealt.streamed_model

    def here(*args: object) -> nn.Module:
        take = args[3](model)  # type: ignore[operator]
        for name, value in list(model.named_parameters()):
            take(name, Whole(value))
        return model

    dealt.streamed_model = here  # type: ignore[assignment]
    try:
        host = copies if any(stage.in_host for stage in cut) else None
        model, flats_of, _ = dealt.dealt_out_model(None, training, CPU, cut, own, host)  # type: ignore[arg-type]
    finally:
        dealt.streamed_model = streamed
    flats = [flat for of_stage in flats_of.values() for flat in of_stage]
    named = dict(model.named_parameters())
    sharded = {slot.name for flat in flats for slot in flat.layout.slots}
    here_whole = {n: p for n, p in named.items() if n not in sharded and (own is None or n in own)}
    trained = {n: p for n, p in here_whole.items() if p.requires_grad}
    pieces = {n: p for flat in flats if flat.layout.trained for n, p in flat.pieces.items()}
    for training_here in (trained_parameters(model), pieces):
        keep_gradients(training_here, module)
    spread = any("sharded" in stage.attrs for stage in stages)
    group = pipeline.place if pipeline is not None else tuple(range(dist.get_world_size()))
    if spread and cell_of(stage) and pipeline is None:
        group = replicas(rank, cell_of(stage) or 1, group or ())
    parts = spread if pipeline is None else pipeline.place is not None
    masters = copies is not None and any(optimizer_in_host(stage) and not layers_in_host(stage) for stage in stages)
    optimizer = Optimizer(
        {**trained, **pieces},
        training,
        sharded=parts,
        group=dist.new_group(list(group or ())) if parts else None,
        host=HostMasters(copies) if masters and copies is not None else None,
        on_host=any(flat.host is not None for flat in flats),
        recipe=recipe_of(trained_parameters(case.model()), training),
    )
    held = Counted()
    held.add(here_whole.values(), host=False)
    held.add(model.buffers(), host=False)
    held.add((flat.shard for flat in flats if flat.host is None), host=False)
    held.add((flat.shard for flat in flats if flat.host is not None), host=True)
    for value in trained.values():
        set_gradient(value, torch.ones(value.shape, dtype=gradient_dtype(value)))
    held.add((gradient for value in trained.values() if (gradient := gradient_of(value)) is not None), host=False)
    for flat in flats:
        if flat.layout.trained:
            held.add([shard_gradient(flat)], host=flat.host is not None)
    in_host = {n for flat in flats if flat.host is not None for n in flat.pieces}
    update(optimizer, held, in_host, {**trained, **pieces}, parts, masters, in_cells=bool(flats))
    return held.device, held.host


def pipeline_rank(module: Module, model: nn.Module, places: Mapping[str, tuple[int, ...]], rank: int) -> PipelineRank:
    stages = module.stages
    paths = tuple(tuple(path for path, _ in layers_of(stage)) for stage in stages)
    flow = flow_of(model)
    read = Cut(flow, paths).parameters
    unread = frozenset(dict(model.named_parameters())) - frozenset().union(*read)
    return PipelineRank(
        rank,
        Cuts(model, paths),  # type: ignore[arg-type]
        tuple(stage.name for stage in stages),
        tuple(places[stage.name] for stage in stages),
        (read[0] | unread, *read[1:]),
        tuple(cell_of(stage) or 1 for stage in stages),
        frozenset(stage.name for stage in stages if "sharded" in stage.attrs),
        frozenset(stage.name for stage in stages if layers_in_host(stage)),
    )


def shard_gradient(flat: FlatLayer) -> Tensor:
    """As a backward leaves it, each piece's a view of it."""
    if flat.host is not None:
        flat.make_host_gradient()
        flat.gradient = flat.host.make_gradient(flat.layout.shard_size, flat.gradient_dtype).zero_()
    else:
        flat.gradient = torch.zeros(flat.layout.shard_size, dtype=flat.gradient_dtype)
    for piece in flat.layout.pieces(flat.member):
        set_gradient(flat.pieces[piece.slot.name], flat.gradient[piece.place : piece.place + piece.size])
    return flat.gradient


class Counted:
    """Bytes of tensors, each memory once."""

    def __init__(self) -> None:
        self.device = self.host = 0
        self._seen: dict[int, Tensor] = {}

    def add(self, tensors: Iterable[Tensor], *, host: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen[storage._cdata] = tensor
                self.host += storage.nbytes() if host else 0
                self.device += 0 if host else storage.nbytes()


def update(
    optimizer: Optimizer,
    held: Counted,
    in_host: set[str],
    updated: Mapping[str, Tensor],
    parts: bool,
    masters: bool,
    *,
    in_cells: bool,
) -> None:
    """An update, with all that it keeps and reads. Parts of summed gradients that are no wider than gradients take
    their place: those are given up first."""
    given = parts_given(optimizer, updated, in_cells=in_cells) if parts else None

    def seen(*_: object) -> None:
        for name, master in optimizer._masters.items():
            host, gradient = masters or name in in_host, master.grad
            source = gradient_of(updated[name])
            if gradient is not None and source is not None and (host or gradient.itemsize > source.itemsize):
                held.add([gradient], host=host)

    handle = optimizer.torch.register_step_pre_hook(seen)
    optimizer.step(given, norm=torch.ones(()))
    handle.remove()
    for name, master in optimizer._masters.items():
        host = masters or name in in_host
        kept = [value for value in optimizer.torch.state[master].values() if isinstance(value, Tensor)]
        held.add([master, *kept, *([optimizer.ema[name]] if optimizer.ema else [])], host=host)
    if optimizer._host is not None:
        held.add([*optimizer._host._taken.values(), *optimizer._host._rounded.values()], host=True)


def parts_given(optimizer: Optimizer, updated: Mapping[str, Tensor], *, in_cells: bool) -> dict[str, Tensor]:
    """This rank's parts of summed gradients: of shards views, else as a reduce-scatter gives them, in fp32 at least."""
    assert optimizer._parts is not None
    given = {}
    for name, value in updated.items():
        gradient = gradient_of(value)
        assert gradient is not None
        own, exact = optimizer._parts.own(gradient), torch.promote_types(gradient.dtype, torch.float32)
        if own.numel():
            given[name] = own if in_cells else own.to(exact, copy=True)
    return given


@st.composite
def cases(draw: st.DrawFn) -> Case:
    low, cuts = draw(st.booleans()), draw(st.sampled_from([(), (), (1,), (2,), (1, 2, 3), (1, 3)]))
    runs = len(cuts) + 1
    stages_each = draw(st.sampled_from([n for n in (1, 2) if runs % n == 0 and 8 % (runs // n) == 0] or [1]))
    if 8 % (runs // stages_each):
        cuts, stages_each = (2,), 1
    host = draw(st.sampled_from(["none", "none", "optimizer", "parameters"]))
    order = draw(st.sampled_from([o for o in permutations(Case.order) if o.index("stages") < o.index("host")]))
    return Case(
        tie=draw(st.sampled_from(sorted(TIES))),
        low=low,
        exact_norms=draw(st.booleans()) and low,
        low_gradients=draw(st.booleans()) and low,
        frozen=draw(st.sampled_from(["", "", "embed", "blocks.0", "head"])),
        adapters=draw(st.integers(0, 4)) == 0,
        ema=draw(st.booleans()),
        cell=draw(st.sampled_from([size for size in (1, 2, 4, 8) if size <= 8 * stages_each // (len(cuts) + 1)])),
        spread=draw(st.booleans()),
        host=host,
        cuts=cuts,
        stages_each=stages_each,
        order=order,
    )


@settings(max_examples=25, deadline=None)
@given(cases())
def test_a_plan_says_to_the_byte_what_its_ranks_hold(case: Case) -> None:
    module = case.module()
    places = stage_places(module, case)
    for ranks in dict.fromkeys(places.values()):
        here = [stage for stage in module.stages if places[stage.name] == ranks]
        said = [round(resident_gib(here, name) * GIB) for name in ("state", "host_state")]
        held = [held_by(rank, module, case, places) for rank in ranks]
        most = [max(sizes) for sizes in zip(*held, strict=True)]
        if len(here) == 1:
            assert most == said, "on the rank that has most"
        else:  # which may be another one of each stage, by the optimizer's counters of a few tensors
            assert all(0 <= a - b <= 4 * len(here) * BLOCKS for a, b in zip(said, most, strict=True)), (said, most)


def held_by(rank: int, module: Module, case: Case, places: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    with rank_of(rank, 8):
        return rank_bytes(module, case, places, rank)


def test_the_order_of_passes_changes_no_sum_of_a_stage_that_lists_no_tensors() -> None:
    """Of a text written by hand there are sums alone."""
    module = parse_module(WAN.read_text(encoding="utf-8"))
    module = replace(module, cluster=parse_cluster("1x8:h100-80g"))
    passes = ShardParameters(cell="4"), Stages(p=2)
    first, second = (two.run(one.run(module)) for one, two in permutations(passes))
    for one, other in zip(first.stages, second.stages, strict=True):
        assert one.attrs.get("gradients") == other.attrs.get("gradients") == "f32"
        assert quantity(one.attrs["state"]) == pytest.approx(quantity(other.attrs["state"]))
        held = 2 + 4 + 12  # parameters, gradients, the optimizer with its masters
        assert quantity(one.attrs["state"]) * GIB == pytest.approx(held * integer(one.attrs["params"]) / 4, rel=1e-3)


@pytest.mark.parametrize("attentions", [(0, 1), (1, 0)])
def test_a_part_whose_blocks_have_no_attention_has_no_heads(attentions: tuple[int, int]) -> None:
    stage = stage_of(Model(), None)
    figures = {name: stage.attrs[name] * 2 for name in FIGURES if name.startswith("block_")}
    blocks = (Symbol("Block"), 2), (Symbol("Other"), 2)
    more = {"blocks": blocks, "classes": (0, 0, 1, 1), "block_attentions": attentions, "block_heads": (12, 1)}
    cut = parts_of(replace(stage, attrs=stage.attrs.updated(heads=12, **{**figures, **more})), (2,))
    assert [part.attrs.get("heads") for part in cut] == [
        (12, 1)[n] if has else None for n, has in enumerate(attentions)
    ]
