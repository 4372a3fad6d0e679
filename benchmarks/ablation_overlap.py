"""What it is worth to sum gradients behind the last backwards, and to encode for the next step meanwhile.

    python benchmarks/ablation_overlap.py predicted [--json FILE]
    python benchmarks/ablation_overlap.py measured [--ranks 3] [--mbit 200] [--rounds 7] [--json FILE]

`predicted`: simulated steps of three models on H100 clusters with the video mix: the same plan with one all-reduce
at the end, with the buckets that the pass `bucket` chooses, and reversed in time where that is possible and helps.
`exposed` is from the end of the last cascade to the end of the last sum, in the three ways. `ahead` is one of many
steps in a row without and with the encoders that ranks run ahead while they wait; "-" where a model has no encoder.

`measured`: the executor on gloo, one program in three ways, all taking their n-th step before any takes its next: one
sum, buckets, buckets and encoders ahead. With `--mbit` every rank is a host of its own behind a link of that speed (as
root, with iproute2: benchmarks/hosts/fabric.py). Without, ranks talk through this machine's memory: there a sum takes
the very cores that compute, and nothing can be hidden. Losses must agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from arachnec.backends.simulator import Simulation, simulate
from arachnec.backends.torch_distributed.executor.encoding import encoders_first
from arachnec.ir.nodes import Instruction, Module, Program, quantity
from arachnec.ir.values import Quantity
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.views.timeline import COMPUTE

HERE = Path(__file__).parent
MODEL = HERE / "models" / "ablation_overlap.py"
CLUSTERS = ("2x8:h100-80g", "8x8:h100-80g")
MODELS = {"wan2_1_1_3b_vae": "Wan2.1 1.3B, VAE", "wan2_1_14b": "Wan2.1 14B", "hunyuanvideo": "HunyuanVideo"}
CLIPS_PER_GPU = (1, 4)
STEPS = 3  # simulated in a row
PLAN = "shard-optimizer,partition{{policy=dual}},annotate,{schedule},place"
SCHEDULES = {
    "default": "schedule-z3{budget=2s}",
    "data-parallel": "schedule-static{policy=data-parallel}",
    "one degree": "schedule-static",
}
FRAMES = (10, 7, 4, 4, 3)  # of 128 x 128 pixels
WAYS = {"one all-reduce": ("lower,check", False), "buckets": ("bucket,lower,check", False),
        "buckets, encoders ahead": ("bucket,lower,check", True)}  # fmt: skip


def predicted() -> list[dict[str, object]]:
    from traced_stages import module_of, video_mix

    rows: list[dict[str, object]] = []
    print(
        f"{'model':17} {'cluster':13} {'clips':>5} {'schedule':14} {'single ms':>11} {'buckets ms':>11} {'gain':>6} "
        f"{'reversed ms':>11} {'gain':>6} {'exposed ms':>16} {'n':>3} {'ahead ms':>16}"
    )
    for model, title in MODELS.items():
        for cluster in CLUSTERS:
            for per_gpu in CLIPS_PER_GPU:
                module = module_of(model, (), cluster)
                assert module.cluster is not None
                count = per_gpu * module.cluster.world
                for schedule, text in SCHEDULES.items():
                    passes = Pipeline.parse(PLAN.format(schedule=text))
                    placed = passes.run(replace(module, clips=video_mix(count, 0)))
                    row = compared(placed) | {"model": title, "cluster": cluster, "clips": count, "schedule": schedule}
                    rows.append(row)
                    print(line(row), flush=True)
    return rows


def compared(placed: Module) -> dict[str, object]:
    """One plan with one all-reduce, with buckets, and reversed in time for them: steps in a row, simulated."""
    row: dict[str, object] = {}
    for name, text in (("one_all_reduce", ""), ("buckets", "bucket{reverse=false},"), ("reversed", "bucket,")):
        module = Pipeline.parse(f"{text}lower,check").run(placed)
        simulation = simulate(module)
        row |= {f"{name}_ms": simulation.iteration_ms, f"{name}_exposed_ms": exposed(simulation)}
    row["count"] = sum(i.op == "reduce" for i in module.programs[0].instructions)
    ahead = in_a_row(module, may_be_ahead(module, simulation))
    row["ahead_ms"] = period(ahead) if ahead is not None else None
    row["in_a_row_ms"] = period(in_a_row(module, {}) or module) if ahead is not None else None
    return row


def exposed(simulation: Simulation) -> float:
    reduce_ends = [i.end for i in simulation.timeline.intervals if i.op == "reduce"]
    return max(0.0, max(reduce_ends, default=0.0) - simulation.makespan_ms)


def may_be_ahead(module: Module, simulation: Simulation) -> dict[int, list[str]]:
    """What each rank begins to encode for its next step before the last sum is through, by the simulated step."""
    rows = {}
    for program in module.programs:
        lane = simulation.timeline.lanes[program.rank]
        now = max((i.end for i in lane if i.op in COMPUTE), default=0.0)
        through = max((i.end for i in lane if i.op == "reduce"), default=0.0)
        times = {i.target: quantity(i.attrs["time"]) for i in program.instructions if i.op == "encode"}
        names = []
        for name in encoders_first(program):
            if now >= through:
                break
            names.append(name)
            now += times[name]
        rows[program.rank] = names
    return rows


def in_a_row(module: Module, ahead: Mapping[int, Sequence[str]]) -> Module | None:
    """Three steps of one program in one; None where nothing is ever encoded by itself before the models run."""
    if not any(encoders_first(program) for program in module.programs):
        return None
    cascades = tuple(
        replace(c, name=f"{c.name}.{step}", inputs=tuple(f"{name}.{step}" for name in c.inputs))
        for step in range(STEPS)
        for c in module.cascades
    )
    programs = tuple(
        replace(p, instructions=tuple(i for step in range(STEPS) for i in _step(p, step, set(ahead.get(p.rank, ())))))
        for p in module.programs
    )
    return replace(module, cascades=cascades, programs=programs)


def _step(program: Program, step: int, ahead: set[str]) -> Iterator[Instruction]:
    """One step; what is encoded ahead is there from the second on, and made for the next one before the end."""
    nothing = Quantity(0.0, "ms")
    moved = [i for i in program.instructions if i.op == "encode" and i.target in ahead]
    for item in program.instructions:
        if item.op == "step":
            yield from (replace(i, target=f"{i.target}.{step + 1}") for i in moved if step + 1 < STEPS)
            moved = []
        if item.op in ("reduce", "step"):
            yield item
            continue
        there = step > 0 and item.op == "encode" and item.target in ahead
        yield replace(
            item, target=f"{item.target}.{step}", attrs=item.attrs.updated(time=nothing) if there else item.attrs
        )


def period(module: Module) -> float:
    """ms from the last rank's second update to its third."""
    ends: dict[int, list[float]] = defaultdict(list)
    for interval in simulate(module).timeline.intervals:
        if interval.op == "step":
            ends[interval.rank].append(interval.end)
    return max(times[-1] for times in ends.values()) - max(times[-2] for times in ends.values())


def line(row: dict[str, object]) -> str:
    whole, parts, reversed_ms = (float(str(row[f"{name}_ms"])) for name in ("one_all_reduce", "buckets", "reversed"))
    hidden = "/".join(f"{row[f'{name}_exposed_ms']:.0f}" for name in ("one_all_reduce", "buckets", "reversed"))
    ahead = "-" if row["ahead_ms"] is None else f"{row['in_a_row_ms']:.0f} to {row['ahead_ms']:.0f}"
    return (
        f"{row['model']:17} {row['cluster']:13} {row['clips']:5} {row['schedule']:14} {whole:11.1f} "
        f"{parts:11.1f} {1 - parts / whole:6.2%} {reversed_ms:11.1f} {1 - reversed_ms / whole:6.2%} "
        f"{hidden:>16} {row['count']:3} {ahead:>16}"
    )


def measured(ranks: int, mbit: float | None, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="arachnec-") as name:
        scratch = Path(name)
        jobs, predictions = compile_ways(scratch, ranks, mbit)
        output = scratch / "steps.json"
        command = [
            sys.executable,
            str(HERE / "ablation_overlap.py"),
            "worker",
            str(output),
            str(rounds),
            json.dumps(jobs),
        ]
        if mbit is None:
            on_this_host(command, ranks)
        else:
            from hosts.fabric import Fabric, hosts

            with hosts(Fabric(racks=1, hosts=ranks, link_mbit=mbit, uplink_mbit=10 * mbit)) as fabric:
                fabric.run(command, timeout=1800.0)
        steps = json.loads(output.read_text())
    return {"ranks": ranks, "mbit": mbit, "predicted_ms": predictions, "steps": steps}


def compile_ways(scratch: Path, ranks: int, mbit: float | None) -> tuple[list[tuple[str, str, bool]], dict[str, float]]:
    """Executables of one plan: (name, folder, whether it encodes ahead), and what the simulator says of each."""
    import arachnec.driver
    from arachnec.profiling.local import profile_here

    clips, cluster, profile = scratch / "clips.jsonl", scratch / "cluster.toml", scratch / "profile.json"
    rows = [{"id": str(n), "frames": f, "height": 128, "width": 128, "text_tokens": 0} for n, f in enumerate(FRAMES)]
    clips.write_text("".join(json.dumps(row) + "\n" for row in rows))
    speed = 1.0 if mbit is None else mbit / 8e3
    cluster.write_text(
        f'nodes = {ranks}\ngpus = 1\ndevice = "cpu"\nmemory = "4 GiB"\n'
        f'inter = "{speed} GB/s"\ninter_latency = "200 us"\n'
    )
    profile_here(MODEL, clips, "1:cpu", profile)
    start = f"partition{{policy=single}},annotate{{profile={profile}}},schedule-z3,place,"
    compiled = arachnec.driver.compile(MODEL, clips, cluster, passes=f"{start}lower,check")
    jobs, predictions = [], {}
    for number, (way, (end, ahead)) in enumerate(WAYS.items()):
        pipeline = Pipeline.parse(start + end)
        module, planning_ms = arachnec.driver.plan_iteration(compiled.model, pipeline, 0)
        plan = dataclasses.replace(compiled, pipeline=pipeline, module=module, planning_ms=planning_ms)
        jobs.append((way, str(plan.write(scratch / f"way{number}")), ahead))
        simulation = simulate(module)
        row = in_a_row(module, may_be_ahead(module, simulation) if ahead else {})
        predictions[way] = simulation.iteration_ms if row is None else period(row)
    return jobs, predictions


def on_this_host(command: Sequence[str], ranks: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    common = {**os.environ, **world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    codes = [process.wait(1800) for process in processes]
    if any(codes):
        raise SystemExit(f"ranks ended with exit codes {codes}")


def worker(output: Path, rounds: int, jobs: list[tuple[str, str, bool]]) -> None:
    """One rank: step n of every way, one after the other, before step n + 1 of any."""
    import torch
    import torch.distributed as dist

    from arachnec.backends.torch_distributed.options import RunOptions
    from arachnec.backends.torch_distributed.run.training_run import Trainer
    from arachnec.executable.folder import read_executable
    from arachnec.launch.ranks import as_rank

    def work(device: torch.device) -> None:
        trainers = {way: Trainer(read_executable(Path(folder)), RunOptions(), device) for way, folder, _ in jobs}
        measurements: dict[str, list[dict[str, float]]] = {way: [] for way in trainers}
        for number in range(rounds + 2):  # the first warms up, and has nothing that was encoded before
            for way, _, ahead in jobs:
                dist.barrier()
                started = time.perf_counter()
                report = trainers[way].step(number, last=not ahead)
                dist.barrier()
                measurements[way].append({"ms": (time.perf_counter() - started) * 1e3, "loss": report.loss})
        for trainer in trainers.values():
            trainer.close()
        if dist.get_rank() == 0:
            output.write_text(json.dumps({way: rows[2:] for way, rows in measurements.items()}))

    as_rank(work, cpu=True)


def report(result: dict[str, object]) -> None:
    steps, predictions = result["steps"], result["predicted_ms"]
    assert isinstance(steps, dict) and isinstance(predictions, dict)
    link = "memory of this machine" if result["mbit"] is None else f"links of {result['mbit']:g} Mbit/s"
    print(f"{result['ranks']} gloo ranks, {link}, {len(steps['one all-reduce'])} rounds")
    base = [row["ms"] for row in steps["one all-reduce"]]
    for way, rows in steps.items():
        times = [row["ms"] for row in rows]
        ratios = sorted(a / b for a, b in zip(times, base, strict=True))
        print(
            f"  {way:24} median {statistics.median(times):8.1f} ms  min {min(times):8.1f}  max {max(times):8.1f}   "
            f"of one all-reduce: {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})   "
            f"predicted {predictions[way]:8.1f} ms, {predictions[way] / predictions['one all-reduce']:.3f}"
        )
    losses = list(zip(*([row["loss"] for row in rows] for rows in steps.values()), strict=True))
    worst = max(abs(loss - row[0]) / abs(row[0]) for row in losses for loss in row)
    print(f"  largest relative difference of the losses: {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    simulated = kinds.add_parser("predicted")
    real = kinds.add_parser("measured")
    real.add_argument("--ranks", type=int, default=3)
    real.add_argument("--mbit", type=float, help="speed of each rank's link; without it ranks share this machine")
    real.add_argument("--rounds", type=int, default=7)
    for table in (simulated, real):
        table.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.kind == "predicted":
        result: object = predicted()
    else:
        result = measurements = measured(options.ranks, options.mbit, options.rounds)
        report(measurements)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
    else:
        main()
