"""Ways to sample 16 requests of four sizes on gloo ranks of this machine: planned, measured, and compared.

    python -m benchmarks.sampling.on_gloo profile FOLDER RANKS       times steps of both models
    python -m benchmarks.sampling.on_gloo plan FOLDER                an executable for every pipeline
    python -m benchmarks.sampling.on_gloo run FOLDER PIPELINE        samples, and adds what it took to FOLDER
    python -m benchmarks.sampling.on_gloo table FOLDER [FILE.json]   all of it

Each step is a command of its own, so that profile and runs can be given a machine where nothing else runs. The pair's
FLOPs differ at least five times at every size. What FLOPs allow is counted, not derived: all forwards of the large
model alone over those of the pair at the same K. A run's time is from the first instruction of any rank to the end of
the last; imports, tracing and connections are before it. More ranks than cores get equal shares of them where
that can be had (`equal_shares.py`).
"""

import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from arachnec.cluster.file import parse_cluster
from arachnec.data.requests import Request, read_requests
from arachnec.executable.folder import MEASURED
from arachnec.generation.plan import asked, compile_requests
from arachnec.generation.run import prepare_executable, run_here
from arachnec.ir.nodes import quantity
from arachnec.models.sampler_file import SamplerFile, load_sampler_file
from arachnec.passes.infra.named_pipelines import SAMPLING_PIPELINES
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.profiling.local import profile_here
from arachnec.views.timeline import COMPUTE, read_measured
from benchmarks.sampling.equal_shares import available, equal_shares

STEPS, LARGE_STEPS, PER_SIZE = 10, 3, 4
SIZES = ((9, 96, 128), (17, 96, 128), (17, 128, 192), (33, 128, 192))
SAMPLER = """
from arachnec.models.diffusers import wan
from arachnec.models.diffusers.sampler import wan_sampler

SHAPES = {"in_channels": 12, "out_channels": 12, "text_dim": 64, "freq_dim": 64}
LARGE = {"num_layers": 6, "num_attention_heads": 6, "attention_head_dim": 32, "ffn_dim": 768}
SMALL = {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 32, "ffn_dim": 384}
sampler = wan_sampler(
    text_length=32,
    large=wan.text_to_video(text_length=32, **SHAPES, **LARGE),
    small=wan.text_to_video(text_length=32, **SHAPES, **SMALL),
)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
"""


def files(folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    sampler, data = folder / "sampler.py", folder / "requests.jsonl"
    sampler.write_text(SAMPLER)
    rows = [
        {
            "caption": "a fox", "frames": frames, "height": height, "width": width, "steps": STEPS,
            "guidance": 1 + (number % 2),
        }
        for number in range(PER_SIZE)
        for frames, height, width in SIZES
    ]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sampler, data


def plan(folder: Path) -> None:
    sampler, data = files(folder)
    ranks = int((folder / "ranks").read_text())
    machine, requests = parse_cluster(f"{ranks}:cpu"), read_requests(data)
    for name, passes in SAMPLING_PIPELINES.items():
        profiled = Pipeline.parse(passes.replace("annotate", f"annotate{{profile={folder / 'profile.json'}}}"))
        sampling, settings = asked(sampler, f"fixed={LARGE_STEPS}", None, "carry", profiled)
        compiled = compile_requests(sampling, settings, requests, machine, profiled)
        compiled.write(folder / name)
        print(f"{name}: planned {quantity(compiled.module.attrs['makespan']) / 1e3:.2f} s", flush=True)


def run(folder: Path, name: str) -> None:
    results = folder / name / "results"
    shutil.rmtree(results, ignore_errors=True)
    generation = prepare_executable(folder / name, results)
    assert generation.program is not None
    with equal_shares(len(generation.program.programs)):
        run_here(generation)
    intervals = [i for i in read_measured(folder / name / MEASURED).intervals if i.op in COMPUTE]
    took = (max(i.end for i in intervals) - min(i.start for i in intervals)) / 1e3
    row = {
        "pipeline": name,
        "planned_s": quantity(generation.program.attrs["makespan"]) / 1e3,
        "measured_s": took,
        "cascades": _of_cascades(generation.program, intervals),
    }
    with (folder / "runs.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{name}: planned {row['planned_s']:.2f} s, measured {took:.2f} s", flush=True)


def _of_cascades(program: object, intervals: Sequence[object]) -> float:
    """Measured over planned ms of all cascades, summed over ranks."""
    planned = sum((c.end - c.start) * c.width for c in program.cascades)  # type: ignore[attr-defined]
    return sum(i.end - i.start for i in intervals) / planned  # type: ignore[attr-defined]


def allowed(sampler: SamplerFile, requests: Sequence[Request]) -> tuple[float, float]:
    """What FLOPs allow of a speed-up over the large model alone, and the least ratio of the models' FLOPs."""
    models = {name: sampler.build(name).eval() for name in ("large", "small")}
    totals, least = {"large": 0.0, "pair": 0.0}, float("inf")
    for request in requests:
        latents = sampler.noise(request, torch.Generator().manual_seed(0))
        flops = {}
        for name, model in models.items():
            given = sampler.call(name, latents, torch.zeros(()), request, True)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                model(**given)
            flops[name] = counter.get_total_flops() * sampler.branches(name, request)
        least = min(least, flops["large"] / flops["small"])
        totals["large"] += STEPS * flops["large"]
        totals["pair"] += LARGE_STEPS * flops["large"] + (STEPS - LARGE_STEPS) * flops["small"]
    return totals["large"] / totals["pair"], least


def table(folder: Path, output: Path | None) -> None:
    rows: dict[str, list[dict[str, float]]] = {}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row.pop("pipeline"), []).append(row)
    ratio, least = allowed(load_sampler_file(folder / "sampler.py"), read_requests(folder / "requests.jsonl"))
    told = []
    for name, runs in rows.items():
        measured = statistics.median(run["measured_s"] for run in runs)
        row = {"pipeline": name, "planned_s": runs[-1]["planned_s"], "measured_s": measured, "runs": len(runs)}
        row |= {"error": row["planned_s"] / measured - 1, "cascades": statistics.median(r["cascades"] for r in runs)}
        told.append(row)
        print(
            f"{name:12} planned {row['planned_s']:6.2f} s, measured {measured:6.2f} s ({row['error']:+.1%}), "
            f"cascades {row['cascades']:.2f} of planned, {len(runs)} runs"
        )
    by_name = {row["pipeline"]: row["measured_s"] for row in told}
    speed_up = by_name["large-only"] / by_name["generate"] if {"large-only", "generate"} <= by_name.keys() else None
    ranks = int((folder / "ranks").read_text())
    if speed_up is not None:
        share = f"{speed_up / ratio:.2f} of what FLOPs allow"
        print(
            f"the pair is {speed_up:.2f}x as fast as the large model alone, {share} ({ratio:.2f}x); least {least:.1f}x"
        )
    if output is not None:
        report = {
            "ranks": ranks,
            "equal_shares": available(ranks),
            "flops_allow": ratio,
            "least_ratio": least,
            "speed_up": speed_up,
            "rows": told,
        }
        output.write_text(json.dumps(report, indent=1) + "\n")


def main(action: str, folder: str, *more: str) -> None:
    place = Path(folder)
    if action == "profile":
        sampler, data = files(place)
        (place / "ranks").write_text(more[0])
        with equal_shares(int(more[0])):
            profile_here(sampler, data, f"{more[0]}:cpu", place / "profile.json", samples=True)
    elif action == "plan":
        plan(place)
    elif action == "run":
        run(place, more[0])
    else:
        table(place, Path(more[0]) if more else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
