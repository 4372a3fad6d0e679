"""Sparse attention in sampling: the same latents for any plan, the dense ones with all keys, and what a step takes.

    python -m benchmarks.sampling.sparse [--parts latents,steps] [--json FILE.json]

`latents`: the tiny pair of `benchmarks.sampling.invariance`, clips of 160 to 400 tokens, predictors with random
projections, fp32, 50 steps, on gloo ranks of one machine. Differences are the largest, over the largest number of the
reference: the same requests sparse on one rank, and for all keys kept the dense latents. `steps`: a model of four
blocks of width 256, 4 heads of 64, on one CPU rank, with guidance: ms of a step dense and at density 0.1, measured, and
planned from a profile of the dense model.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from arachnec.data.switch import parse_switch
from arachnec.generation.plan import traced
from arachnec.passes.infra.pipeline import Pipeline
from benchmarks.sampling.invariance import PLANS, WORLD, difference
from benchmarks.sampling.invariance import REQUESTS as SHORT
from tests.distributed.executor_cases import cluster
from tests.generation.cases import SAMPLER, expected, lowered, run, sampling_of, written
from tests.generation.sparse_cases import FORCED, checkpoint, predictors

RULE = parse_switch("fixed=17")
REQUESTS = tuple(replace(request, frames=20 * request.frames) for request in SHORT)  # 160 to 400 tokens
DENSITY, STEPS = 0.1, 4
FRAMES = {1024: 4, 4096: 16, 8192: 32}  # of 16 x 16 tokens each
WIDE = (
    ("Block(12, 3, 24) for _ in range(2)", "Block(256, 4, 1024) for _ in range(4)"),
    ("12)", "256)"),
    ("(12,", "(256,"),
)


@dataclass(frozen=True)
class Latents:
    what: str
    relative_difference: float


@dataclass(frozen=True)
class Step:
    """ms of one step with guidance."""

    tokens: int
    dense: float
    dense_planned: float
    sparse: float
    sparse_planned: float
    layers: int  # that ran sparse


def latents(folder: Path) -> Iterator[Latents]:
    more = predictors(large=checkpoint(folder / "run"), small=folder / "run")
    sampling = sampling_of(written(folder, more), RULE)
    module = traced(sampling, REQUESTS).module(cluster(WORLD))
    dense = {str(request.id): expected(sampling, request) for request in REQUESTS}

    def of_plan(plan: str, options: str) -> dict[str, torch.Tensor]:
        passes = f"sparsify{{{options}}},segment{{length=2}},annotate"
        program = lowered(Pipeline.parse(passes).run(module), PLANS[plan])
        told = {id: produced for id, (_, produced) in run(folder, program, RULE, REQUESTS).items()}
        assert all(cascade.attrs.get("sparse") == (0, 1) for cascade in program.cascades)
        for file in (folder / "out").iterdir():
            file.unlink()
        return {id: produced for id, produced in told.items() if produced is not None}

    kept = of_plan("one rank", f"density=1,{FORCED}")
    yield Latents("all keys kept, over dense", max(difference(kept[id], dense[id]) for id in dense))
    alone = of_plan("one rank", FORCED)
    yield Latents("chosen keys, over dense", max(difference(alone[id], dense[id]) for id in dense))
    for plan in PLANS:
        shared = of_plan(plan, FORCED)
        yield Latents(plan, max(difference(shared[id], alone[id]) for id in alone))


def steps(folder: Path) -> Iterator[Step]:
    source = SAMPLER
    for before, after in WIDE:
        source = source.replace(before, after)
    source = source.replace(', "small": lambda: Tiny()', "")
    held = checkpoint(
        folder / "run", {f"blocks.{n}": True for n in range(4)}, (DENSITY,) * 4, heads=4, size=64, rank=16
    )
    (folder / "sampler.py").write_text(source + predictors(large=held))
    for tokens, frames in FRAMES.items():
        row = {"caption": "fox", "frames": frames, "height": 128, "width": 128, "steps": STEPS, "guidance": 3.0}
        (folder / "requests.jsonl").write_text(json.dumps(row) + "\n")
        _arachnec(folder, "profile", "-o", "profile.json")
        dense, sparse = _generated(folder, "dense", ""), _generated(folder, "sparse", "sparsify,")
        yield Step(tokens, *dense[:2], *sparse)


def _generated(folder: Path, name: str, passes: str) -> tuple[float, float, int]:
    """ms of a step as measured and as planned, and how many layers were sparse."""
    from arachnec.ir.parser import parse_file

    out = f"{name}-out"
    pipeline = f"{passes}segment,annotate,schedule-sampling,place,lower,check"
    _arachnec(folder, "generate", "-o", out, "--profile", "profile.json", "--passes", pipeline)
    plan = folder / out / "plan"
    (cascade,) = parse_file(plan / "program.cascade").cascades
    told = json.loads((plan / "measured.json").read_text())["intervals"]
    (took,) = [interval["end"] - interval["start"] for interval in told if interval["op"] == "denoise"]
    sparse = cascade.attrs.get("sparse", ())
    assert isinstance(sparse, tuple)
    return took / STEPS, (cascade.end - cascade.start) / STEPS, len(sparse)


def _arachnec(folder: Path, command: str, *options: str) -> None:
    files = ("sampler.py", "--data", "requests.jsonl", "--cluster", "1:cpu")
    subprocess.run(
        [sys.executable, "-m", "arachnec", command, *files, *options], cwd=folder, check=True, capture_output=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="latents,steps")
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, object]]] = {}
    for part in arguments.parts.split(","):
        with tempfile.TemporaryDirectory() as name:
            for row in {"latents": latents, "steps": steps}[part](Path(name)):
                rows.setdefault(part, []).append(asdict(row))
                print(
                    "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{v}" for k, v in asdict(row).items()),
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
