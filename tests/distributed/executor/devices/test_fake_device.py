"""A step on a device with streams: only the threads of handoffs may wait for it, and it needs what was planned."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from arachnec import driver
from arachnec.analysis.memory import usages
from arachnec.analysis.uses import Values
from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead, encoded_here
from arachnec.backends.torch_distributed.executor import interpreter
from arachnec.backends.torch_distributed.executor.interpreter import grid_of, run_iteration
from arachnec.backends.torch_distributed.executor.iteration import Iteration
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.rank.sharded_blocks import Sequences
from arachnec.driver import Compiled, compile, plan_iteration
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Instruction, Module, Stage
from arachnec.ir.stage_sizes import gradient_bytes, gradient_element_bytes, trained_count
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.model_state.kept_gradients import keep_gradients
from arachnec.model_state.optimizer import Optimizer
from arachnec.model_state.updated_parameters import layers_of_stages, updated_parameters
from arachnec.passes.infra.base import installed, load_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.handoffs import HandoffConnections, TensorSpec
from arachnec.runtime.rank_resources import RankThreads, wanted_gradient_groups, wanted_groups
from arachnec.runtime.step_progress import Clock
from tests.distributed import fake_device
from tests.distributed.harness import PRELOAD, RankPool
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[4]
PASSES = ROOT / "tests" / "acceptance" / "passes.py"
RANKS = 4
GRIDS = (4, 2, 1)  # Ulysses degrees
MODEL = """
import torch
from arachnec.models.diffusers import wan

model = wan.text_to_video("Wan2.1-T2V-1.3B", num_layers=LAYERS, dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss
"""
WITH_ENCODER = """

class Latents(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def load(self, clip, device):
        return torch.zeros(1, 16, (clip.frames - 1) // 4 + 1, clip.height // 8, clip.width // 8, device=device)

    def forward(self, x):
        return x * self.scale


def encoders():
    return {"vae": Latents()}


def sample(clip, generator):
    kwargs, target = model.sample(clip, generator)
    return {**kwargs, "hidden_states": kwargs["hidden_states"] + clip.encoded["vae"].to(torch.bfloat16)}, target
"""
CLUSTER = """
nodes = 1
gpus = 4
device = "h100-80g"
memory = "6 GiB"
"""
CLIPS = [{"id": "a", "frames": 49, "height": 480, "width": 832, "text_tokens": 512},
         {"id": "b", "frames": 17, "height": 480, "width": 832, "text_tokens": 512}]  # fmt: skip


WITHIN = 0.05
MAY_WAIT = ("handoff", "loads")  # threads


@dataclass(frozen=True)
class Seen:
    """Of one step."""

    waits: list[tuple[str, str]]  # thread, and what it waited in
    peaks: list[float]  # GiB allocated at most during each instruction
    planned: list[float]  # GiB, as `check` counts them
    grids: set[tuple[int, int]]  # Ulysses and ring degrees that ran
    done: list[str]  # instructions
    gradients: float  # GiB of them, which a plan counts always
    parts: float  # GiB of this rank's parts of their sums, which a plan counts always
    sharded: bool


class NoConnections(HandoffConnections):
    """The group of all ranks, whose messages go nowhere."""

    @property
    def group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def steps(folder: Path, everything: bool = False) -> dict[int, Seen]:
    """One model, traced once, with every grid of its ranks.

    With ``everything`` there is an encoder, whose output is handed off, and the optimizer is dealt out, because devices
    are small; then Ulysses alone.
    """
    device = fake_device.register(0, RANKS)  # before the first backward, which asks once for the devices there are
    model = f"LAYERS = {4 if everything else 2}\n" + MODEL + (WITH_ENCODER if everything else "")
    (folder / "model.py").write_text(model)
    (folder / "small.toml").write_text(CLUSTER)
    (folder / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in CLIPS))
    with mock.patch.object(driver, "has_gpus", lambda cluster: False):  # the fake one has a processor's norms
        compiled = compile(
            folder / "model.py", folder / "clips.jsonl", folder / "small.toml" if everything else f"1x{RANKS}:h100-80g",
            passes=pipeline(GRIDS[0]),
        )  # fmt: skip
    seen = {}
    for ulysses in (RANKS,) if everything else GRIDS:
        module, _ = plan_iteration(compiled.model, pipeline(ulysses), 0)
        gc.disable()  # what a step leaves behind is to go at once, not when the collector comes
        try:
            seen[ulysses] = step(device, module, compiled)
        finally:
            gc.enable()
        gc.collect()
        assert device.memory.now == 0  # nothing of this grid is counted with the next
    return seen


def pipeline(ulysses: int) -> Pipeline:
    text = (
        f"shard-optimizer,partition{{policy=equal-token}},annotate,assign{{degrees=[{RANKS}]}},place,"
        f"regrid{{ulysses=[{ulysses}]}},bucket,lower,check"
    )
    return Pipeline.parse(text, load_file(PASSES, installed()))


def step(device: fake_device.FakeDevice, module: Module, compiled: Compiled) -> Seen:
    """Two steps on rank 0; the second is watched."""
    model_file, clips = compiled.model_file, compiled.manifest.clips
    with torch.device("meta"):
        model = model_file.build()
    sequence = Sequences(model_file, model, clips, torch.bfloat16, model_file.build).for_program(module)
    device.move(model)
    encoders = model_file.encoders() if model_file.encoders else {}
    for encoder in encoders.values():
        device.move(encoder.requires_grad_(False))
    parameters = trained_parameters(model)
    keep_gradients(parameters, module)
    training = Training(dtype="bf16")
    batches, loads = (ThreadPoolExecutor(1, name, initializer=device.used().__enter__) for name in ("batches", "loads"))
    threads = RankThreads(batches=batches, loads=loads)
    sharded = any("sharded" in stage.attrs for stage in module.stages)
    cascades = {cascade.name: cascade for cascade in module.cascades}
    runtime = DeviceRuntime.of(device.device)
    with device.used():
        optimizer = Optimizer(parameters, training, sharded=sharded)
        layers = layers_of_stages(module, model, parameters)
        context = RankContext(
            rank=0, runtime=runtime, model_file=model_file, model=model, parameters=parameters,
            encoders=encoders, sequence=sequence, optimizer=optimizer,
            groups=ProcessGroups(), gradient_groups=ProcessGroups(), host_groups=ProcessGroups(),
            connections=NoConnections(), threads=threads, loads=LoadAhead(threads.loads, encoders, runtime),
            training=training, updated=updated_parameters(layers, module, model, optimizer, {}),
        )  # fmt: skip
        context.groups.ensure(wanted_groups(module))
        context.gradient_groups.ensure(wanted_gradient_groups(module))
        context.host_groups.ensure(wanted_gradient_groups(module))
        for number in range(2):
            specs = {name: TensorSpec((1, 16, 13, 60, 104), torch.float32) for name in cascades}
            iteration = Iteration.of(module, 0, dict(enumerate(clips)), specs, number)
            here = encoded_here(iteration.program, cascades, iteration.clips)
            context.loads.want(number, here)
            with pytest.MonkeyPatch.context() as patch, device.watched() as waits:
                peaks = peaks_of_instructions(device.memory, patch)
                until_the_optimizer_is_done(device.waits, patch)
                waits.seen.clear()
                run_iteration(context, iteration, Clock(0, runtime))
    threads.close()
    forwards = [step for step in iteration.program.instructions if step.op == "forward"]
    return Seen(
        waits=waits.seen,
        peaks=[peak / 2**30 for peak in peaks],
        planned=[usage.total - usage.communicators for usage in usages(Values(module), iteration.program)][1:],
        grids={grid_of(forward, cascades[forward.target])[1:] for forward in forwards},
        done=[instruction.op for instruction in iteration.program.instructions],
        gradients=sum(gradient_bytes(stage) for stage in module.stages) / 2**30,
        parts=sum(parts_bytes(stage) for stage in module.stages) / 2**30,
        sharded=sharded,
    )


def parts_bytes(stage: Stage) -> float:
    """Bytes of a rank's parts in fp32 of gradients of lower precision, where the optimizer is dealt out."""
    apart = "sharded" in stage.attrs and gradient_element_bytes(stage) < 4
    return 4 * trained_count(stage) / RANKS if apart else 0.0


def peaks_of_instructions(memory: fake_device.Memory, patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes allocated at most during each instruction, filled while they run."""
    execute = interpreter._Walk.execute
    peaks: list[int] = []

    def watched(walk: interpreter._Walk, instruction: Instruction) -> None:
        memory.peak = memory.now
        execute(walk, instruction)
        peaks.append(memory.peak)

    patch.setattr(interpreter._Walk, "execute", watched)
    return peaks


def until_the_optimizer_is_done(waits: fake_device.Waits, patch: pytest.MonkeyPatch) -> None:
    """What comes later, such as the loss that is reported, may wait."""
    step = Optimizer.step

    def last(self: Optimizer, *arguments: Any) -> torch.Tensor:
        norm = step(self, *arguments)
        waits.noting = False
        return norm

    patch.setattr(Optimizer, "step", last)


def needs_what_was_planned(seen: Seen) -> None:
    """A plan counts gradients from the start, and parts of their sums; on the device gradients come into being in the
    first backward, and parts in the last, in the room of gradients."""
    first = seen.done.index("backward")
    for index, (op, peak, planned) in enumerate(zip(seen.done, seen.peaks, seen.planned, strict=True)):
        if op not in ("forward", "backward"):
            continue
        expected = planned - seen.parts
        if index == first or (seen.sharded and index < first):  # updated parameters arrive in the room of gradients
            assert (1 - WITHIN) * (expected - seen.gradients) < peak < (1 + WITHIN) * expected, (op, index)
        else:
            assert peak == pytest.approx(expected - seen.gradients * (index < first), rel=WITHIN), (op, index)


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    """One that the device can be registered in."""
    pool = RankPool(1, program=warm_python(PRELOAD))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def seen_by_grid(process: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    (seen,) = process.run(steps, tmp_path_factory.mktemp("faked"), timeout=280)
    return seen


@pytest.mark.parametrize("ulysses", GRIDS, ids=["ulysses", "product", "ring"])
def test_a_step_waits_for_nothing_and_needs_what_was_planned(ulysses: int, seen_by_grid: dict[int, Seen]) -> None:
    seen = seen_by_grid[ulysses]
    assert seen.grids == {(ulysses, RANKS // ulysses)}
    assert [wait for wait in seen.waits if not wait[0].startswith(MAY_WAIT)] == []
    needs_what_was_planned(seen)


def test_encoders_handoffs_and_a_sharded_optimizer_wait_for_nothing_either(process: RankPool, tmp_path: Path) -> None:
    ((seen,),) = (by_grid.values() for by_grid in process.run(steps, tmp_path, True, timeout=280))
    assert seen.sharded
    assert {"gather", "encode", "send", "forward", "backward", "free", "reduce", "norm", "step"} <= set(seen.done)
    # the thread that makes batches waits for what this rank has encoded itself
    assert [wait for wait in seen.waits if not wait[0].startswith((*MAY_WAIT, "batches"))] == []
    needs_what_was_planned(seen)


def wait_in_every_way() -> list[str]:
    """The names of the waits, and how many bytes lived at most."""
    device = fake_device.register(0, RANKS)
    device.waits.seen.clear()
    device.memory.peak = device.memory.now
    with device.used(), device.watched() as waits:
        value = torch.zeros(1000, device=device.device)
        value.to("cpu", non_blocking=True)
        (value + 1).sum()
        torch.ones(3).to(device.device, non_blocking=True)
        assert not waits.seen
        value.cpu()
        float(value.sum())
        torch.ones(3).to(device.device)
        torch.zeros(1000).copy_(value)
        torch.get_device_module(device.device).synchronize()
        DeviceRuntime.of(device.device).record().synchronize()
    assert device.memory.peak == 4 * (1000 + 1000 + 1)
    return [what.partition("\n")[0].partition(",")[0] for _, what in waits.seen]


def test_every_way_of_waiting_is_seen(process: RankPool) -> None:
    (seen,) = process.run(wait_in_every_way)
    assert seen == [
        "aten::_to_copy", "aten::_local_scalar_dense", "aten::_to_copy", "aten::copy_", "synchronize",
        "Event.synchronize",
    ]  # fmt: skip


def devices_beside_a_kernel() -> tuple[str, str]:
    """What kind of device a tensor is on for a thread in a kernel, and for another one meanwhile."""
    device = fake_device.register(0, RANKS)
    value = device.tensor(torch.zeros(4))
    with ThreadPoolExecutor(1) as other, in_kernel_invocation_manager(device.mode):
        return value.device.type, other.submit(lambda: value.device.type).result()


def test_a_kernel_of_one_thread_hides_no_device_from_another(process: RankPool) -> None:
    (seen,) = process.run(devices_beside_a_kernel)
    assert seen == ("meta", fake_device.NAME)
