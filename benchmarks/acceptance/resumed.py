"""A run that goes on from a checkpoint, what ``export`` makes of it, and runs with sparse attention and fused kernels.

All in fp32. A resumed run repeats the steps of the uninterrupted one on the same device, from values that a checkpoint
holds to the bit: only kernels that sum in no fixed order may differ. Fused kernels sum in another order than eager
ones, in every block of every step; a loss, the mean over some ten thousand numbers, may hide that, so what the blocks
ran is counted. Keys are chosen where that saves nothing: sparse kernels are said to be so fast that layers of any
length turn sparse as soon as their predictors are right, which those of a head's own rank are from the first step on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from acceptance.machine import Machine, Row, verdict
from acceptance.runs import apart, compiled, jsonl, losses, median, ran, ran_by_command, wan_file
from safetensors.torch import load_file

from arachnec.executable.folder import read_executable
from arachnec.export.folder import export
from arachnec.kernels.sparse.key_lists import density
from arachnec.model_state.key_list_files import read_lists
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.spmd.sharded_model import BlockForward, BlockGraph

TINY = "num_layers={layers}, num_attention_heads=2, attention_head_dim={head}, ffn_dim={ffn}, in_channels=4, "
TINY += "out_channels=4, text_dim=16, freq_dim=32"
SAME, FUSED = 1e-5, 1e-4  # of the losses, relative
STEPS, EVERY, LAYERS = 4, 2, 2


def rows(machine: Machine) -> Iterator[Row]:
    head, ffn, height, frames = (12, 48, 64, (5, 9)) if machine.dry else (64, 512, 256, (17, 33))
    model = wan_file(machine, "resumed_model", TINY.format(layers=LAYERS, head=head, ffn=ffn))
    clips = [{"frames": n, "height": height, "width": height, "text_tokens": 16, "iteration": n} for n in frames]
    data = jsonl(machine.scratch / "resumed.jsonl", clips)
    plain = compiled(machine, "plain", model, data)
    checkpoints = machine.scratch / "checkpoints"
    whole = ran_by_command(plain, STEPS, "--checkpoint", checkpoints, "--every", EVERY)
    yield from resumed(machine, plain, checkpoints, whole)
    yield fused(machine, compiled(machine, "fused", model, data, "fused"), whole)
    yield sparse(machine, compiled(machine, "sparse", model, data, sparse_passes(machine, head)), whole)


def sparse_passes(machine: Machine, rank: int) -> str:
    """The pipeline, with layers that turn sparse after the first step: predictors of a head's own ``rank``."""
    small = ",group=16,block=1" if machine.dry else ""
    fast = "overhead=0ms,forward_speed=1e6,backward_speed=1e6,choice_speed=1e6,learning_speed=1e9"
    return PIPELINES["sparse"].replace("sparsify", f"sparsify{{mass=0.3,rank={rank}{small},{fast}}}", 1)


@contextmanager
def counted_blocks() -> Iterator[dict[str, int]]:
    """How often a block ran the graph with fused calls, the one whose attention can be sparse, or its own forward."""
    counts = {"fused": 0, "sparse": 0, "other": 0}
    run = BlockForward._run

    def counting(self: BlockForward, graph: BlockGraph, module: Any, *values: Any) -> Any:
        sparse = graph.sparse is not None and module is graph.sparse.whole
        whole = module is graph.whole and len(module.graph.nodes) < len(graph.block.captured.graph_module.graph.nodes)
        counts["sparse" if sparse else "fused" if whole else "other"] += 1
        return run(self, graph, module, *values)

    with mock.patch.object(BlockForward, "_run", counting):
        yield counts


def beside(report: Row, whole: Row) -> Row:
    """A run beside the plain one."""
    row = {"device": report["device"], "losses": losses(report), "error": apart(losses(report), losses(whole))}
    return row | {
        name: median(run["steps"][2:], "step_ms") for name, run in (("step_ms", report), ("plain_step_ms", whole))
    }


def fused(machine: Machine, folder: Path, whole: Row) -> Row:
    with counted_blocks() as counts:
        report = ran(machine, folder, STEPS)
    row = {"pipeline": "fused", **beside(report, whole), "blocks": counts, "regions": regions(folder)}
    judged = verdict(row, "error", FUSED)
    return {**judged, "right": judged["right"] and counts["fused"] == STEPS * LAYERS and bool(row["regions"])}


def regions(folder: Path) -> list[str]:
    """What the plan fuses."""
    return [region.name for graph in read_executable(folder).fused_graphs() for region in graph.fused]


def sparse(machine: Machine, folder: Path, whole: Row) -> Row:
    """All layers have turned sparse, and the lists of the last step leave keys out."""
    lists = machine.scratch / "lists"
    with counted_blocks() as counts:
        report = ran(machine, folder, STEPS, save_lists=lists)
    saved = [known for known in read_lists(lists, STEPS - 1).values() if known is not None]
    listed = [density(known, 1 + int(known.indices.max())).mean().item() for known in saved]
    row = {"pipeline": "sparse", **beside(report, whole), "blocks": counts, "listed": listed}
    row |= {"sparse_layers": report["sparse_layers"]}
    ran_sparse = len(listed) == LAYERS and max(listed) < 1 and counts["sparse"] == STEPS * LAYERS
    lengths = all(layer["sparse"] and layer["sparse_lengths"] for layer in report["sparse_layers"])
    return {**row, "right": None not in losses(report) and ran_sparse and lengths}


def resumed(machine: Machine, folder: Path, checkpoints: Path, whole: Row) -> Iterator[Row]:
    """From step 2, the later checkpoints being gone; and the exported weights of the last one."""
    for later in later_than(checkpoints, EVERY):
        shutil.rmtree(later)
    report = ran(machine, folder, STEPS, checkpoint=checkpoints, resume=True)
    row = {"device": report["device"], "losses": losses(whole), "resumed": losses(report)}
    row |= {"first_step": report["steps"][0]["step"], "error": apart(losses(report), losses(whole)[EVERY:])}
    yield verdict(row, "error", SAME)
    exported = machine.scratch / "exported"
    export(read_executable(folder), checkpoints, exported)
    names = []
    for path in sorted(exported.rglob("*.safetensors")):
        names += [name for name, value in load_file(path).items() if not value.isfinite().all()]
    yield {"exported": [path.name for path in sorted(exported.iterdir())], "not_finite": names, "right": not names}


def later_than(checkpoints: Path, step: int) -> list[Path]:
    """The folders of checkpoints behind this step."""
    return [path for path in checkpoints.glob("step-*") if int(path.name.removeprefix("step-")) > step]
