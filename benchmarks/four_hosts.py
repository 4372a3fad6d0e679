"""Placement that knows the topology against placement that does not, measured on four hosts in two racks.

    python benchmarks/four_hosts.py [--rounds 7] [--json FILE]          as root, with iproute2

The hosts are network namespaces with shaped links; each rack shares an uplink. The links are measured first, and with
what was found the cluster is described as any other; the model's stages are profiled on one rank. Then every
pipeline is compiled twice, with ``place`` and with ``place{topology=false}``, and the real executor runs one rank a
host: all different plans take their n-th step before any takes its next, and before each round the links are measured
again, so that whatever else the machine does meets them alike.

Printed are the median step of every plan, what the simulator says of it with the links measured in turns with it,
and the bytes that crossed the uplinks, by their counters and by the program. Losses must agree: a plan may change the
speed only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hosts.fabric import Fabric, Hosts, hosts, unavailable
from same_program import shape
from scipy.stats import kendalltau

import arachnec.driver
from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import rack_of
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.executable.folder import iteration_of
from arachnec.ir.nodes import Cluster, Instruction, Module, integer
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.recost import Recost
from arachnec.profiling.local import profile_here

HERE = Path(__file__).parent
MODEL, WORKER = HERE / "hosts" / "model.py", "hosts.worker"
FABRIC = Fabric(racks=2, hosts=2, link_mbit=50, uplink_mbit=25)
MEMORY = 0.0052  # GiB: the longer clips fit on two hosts only
CLIPS = ((12, 2), (8, 2), (4, 4), (2, 2))  # frames of 64 x 64 pixels, and how many such clips
MIXES = {
    "mixed": CLIPS,
    "long": ((12, 2), (8, 1)),
    "few": ((8, 2), (4, 2)),
    "even": ((8, 6),),
    "short": ((12, 1), (4, 3), (2, 6)),
}
SCHEDULES = {
    "z3": "partition{policy=single},annotate{profile=PROFILE},schedule-z3",
    "z3, batches": "partition,annotate{profile=PROFILE},schedule-z3",
    "one degree": "partition{policy=single},annotate{profile=PROFILE},schedule-static{degree=2}",
    "flexsp": "partition{policy=single},annotate{profile=PROFILE},schedule-flexsp",
    "knapformer": "partition{policy=single},annotate{profile=PROFILE},schedule-knapformer",
    "genetic": "partition{policy=single},annotate{profile=PROFILE},schedule-genetic",
}
Sent = dict[int, float]  # bytes by rack
Links = dict[str, list[tuple[int, float]]]  # bytes and ms of messages, by pairs of hosts
PLACES = {"aware": "place", "blind": "place{topology=false}"}


@dataclasses.dataclass(frozen=True)
class Run:
    steps: dict[str, list[dict[str, float]]]  # by folder: ms, loss, and bytes that left each rack
    links: list[Links]  # before each round


def write_clips(path: Path, clips: Sequence[tuple[int, int]] = CLIPS) -> None:
    rows = [
        {"frames": frames, "height": 64, "width": 64, "text_tokens": 0} for frames, count in clips for _ in range(count)
    ]
    path.write_text("".join(json.dumps({"id": number, **row}) + "\n" for number, row in enumerate(rows)))


def write_cluster(path: Path, fabric: Fabric, measured: Links) -> None:
    """The hosts as a cluster file: alpha and beta of the links from the messages that were timed."""
    latency, speed = alpha_beta(measured["in both racks"])
    _, crossing = alpha_beta(measured["twice between racks"])
    path.write_text(
        f"nodes = {fabric.world}\n"
        "gpus = 1\n"
        'device = "cpu"\n'
        f'memory = "{MEMORY} GiB"\n'
        f'inter = "{speed:.6f} GB/s"\n'
        f'inter_latency = "{latency:.1f} us"\n'
        f"rack = {fabric.hosts}\n"
        f'uplink = "{2 * crossing:.6f} GB/s"  # two pairs shared it\n'
    )


def alpha_beta(messages: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """us and GB/s of time = alpha + bytes / beta: alpha from the shortest message, beta from all others."""
    (short, alpha), *long = messages
    return alpha * 1e3, sum(size - short for size, _ in long) / sum(ms - alpha for _, ms in long) / 1e6


def measure_links(machines: Hosts, scratch: Path) -> Links:
    file = scratch / "links.json"
    work(machines, "links", file)
    measured: Links = json.loads(file.read_text())
    return measured


def middle(rounds: Sequence[Links]) -> Links:
    """Of every message the median over the rounds, of the shortest the least: the rest is a busy machine's."""
    return {
        pairs: [
            (size, (statistics.median if number else min)(measured[pairs][number][1] for measured in rounds))
            for number, (size, _) in enumerate(messages)
        ]
        for pairs, messages in rounds[0].items()
    }


def compile_plans(
    scratch: Path, clips: Path, cluster: Path, schedules: dict[str, str], profile: Path
) -> dict[tuple[str, str], tuple[Path, Module]]:
    """The executable and the program of every schedule with every placement; each schedule is made once."""
    executables: dict[tuple[str, str], tuple[Path, Module]] = {}
    texts = {name: before.replace("PROFILE", str(profile)) for name, before in schedules.items()}
    compiled = arachnec.driver.compile(MODEL, clips, cluster, passes=f"{next(iter(texts.values()))},place,lower,check")
    traced = iteration_of(compiled.traced, 0)
    for schedule, before in texts.items():
        scheduled = Pipeline.parse(before).run(traced)
        for name, place in PLACES.items():
            module = Pipeline.parse(f"{place},lower,check").run(scheduled)
            plan = dataclasses.replace(
                compiled, pipeline=Pipeline.parse(f"{before},{place},lower,check"), module=module
            )
            executables[schedule, name] = plan.write(scratch / f"plan{len(executables)}"), module
    return executables


def run_plans(machines: Hosts, scratch: Path, folders: Sequence[Path], rounds: int) -> Run:
    """What every step of every plan came to, by folder, and the links between the rounds."""
    output = scratch / "steps.json"
    work(machines, "steps", output, rounds, machines.name, *folders)
    measured = json.loads(output.read_text())
    return Run(measured["steps"], measured["links"])


def work(machines: Hosts, *arguments: str | int | Path) -> None:
    """The worker on every host."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    machines.run([sys.executable, "-m", WORKER, *map(str, arguments)], environment={"PYTHONPATH": path}, timeout=1800.0)


def crossing_bytes(module: Module) -> list[int]:
    """Bytes that each rack sends to others in one step of a lowered program, by its instructions alone."""
    cluster = module.cluster
    assert cluster is not None
    cost = CostModel(module)
    sent: Sent = defaultdict(float)
    for cascade in module.cascades:
        group, ulysses = cascade.ranks, integer(cascade.attrs.get("ulysses", cascade.degree))
        moved = cost.volumes(cascade, Attention(ulysses, cascade.degree // ulysses), cost.recomputed(cascade))
        for first in range(0, len(group), moved.ulysses):
            _all_to_all(sent, cluster, group[first : first + moved.ulysses], moved.traded / moved.ulysses)
        _all_to_all(sent, cluster, group, moved.gathered / moved.degree)
        for first in range(moved.ulysses):
            _ring(sent, cluster, group[first :: moved.ulysses], moved.passed)
    seen: set[Instruction] = set()
    for program in module.programs:
        for step in program.instructions:
            size = step.attrs.get("bytes", 0)
            assert isinstance(size, int)
            if step.op == "send":
                _send(sent, cluster, program.rank, step.peers[0], size)
            elif step.op == "reduce" and step not in seen:
                seen.add(step)
                _ring(sent, cluster, step.peers, 2 * (len(step.peers) - 1) / len(step.peers) * size)
    racks = {rack_of(cluster, rank) for rank in range(cluster.world)}
    return [round(sent[rack]) for rack in sorted(racks)]


def _all_to_all(sent: Sent, cluster: Cluster, members: Sequence[int], size: float) -> None:
    for source in members:
        for target in members:
            _send(sent, cluster, source, target, size)


def _ring(sent: Sent, cluster: Cluster, members: Sequence[int], size: float) -> None:
    for source, target in zip(members, (*members[1:], members[0]), strict=True):
        _send(sent, cluster, source, target, size)


def _send(sent: Sent, cluster: Cluster, source: int, target: int, size: float) -> None:
    if rack_of(cluster, source) != rack_of(cluster, target):
        sent[rack_of(cluster, source)] += size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="keep what was measured here")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    with hosts(FABRIC) as machines, tempfile.TemporaryDirectory(prefix="arachnec-") as scratch:
        results = measure(machines, Path(scratch), options.rounds)
    report(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(machines: Hosts, scratch: Path, rounds: int) -> dict[str, object]:
    clips, cluster, stages = scratch / "clips.jsonl", scratch / "cluster.toml", scratch / "profile.json"
    write_clips(clips)
    write_cluster(cluster, machines.fabric, measure_links(machines, scratch))
    profile_here(MODEL, clips, "1:cpu", stages)
    plans: dict[tuple[str, str], list[tuple[str, str, Path, Module]]] = defaultdict(list)  # those that are the same
    for mix, counts in MIXES.items():
        (scratch / mix).mkdir()
        write_clips(scratch / mix / "clips.jsonl", counts)
        of_mix = compile_plans(scratch / mix, scratch / mix / "clips.jsonl", cluster, SCHEDULES, stages)
        for (schedule, place), (folder, module) in of_mix.items():
            plans[mix, shape(module)].append((schedule, place, folder, module))
    run = run_plans(machines, scratch, [same[0][2] for same in plans.values()], rounds + 1)
    links = middle(run.links[1:])
    write_cluster(cluster, machines.fabric, links)
    rows = []
    for (mix, _), same in plans.items():
        _, _, folder, module = same[0]
        steps = run.steps[str(folder)][1:]  # the first warms up
        rows.append(
            {
                "clips": mix,
                "plans": [[schedule, place] for schedule, place, *_ in same],
                "predicted_ms": predicted_ms(module, cluster, stages),
                "measured_ms": [step["ms"] for step in steps],
                "losses": [step["loss"] for step in steps],
                "program_bytes": sum(crossing_bytes(module)),
                "uplink_bytes": statistics.median(step["rack 0"] + step["rack 1"] for step in steps),
            }
        )
    return {"cluster": cluster.read_text(), "links": links, "plans": rows}


def predicted_ms(module: Module, cluster: Path, profile: Path) -> float:
    """The iteration of a lowered program on links of other speeds."""
    assert module.cluster is not None
    links = dataclasses.replace(parse_cluster(str(cluster)), name=module.cluster.name)
    return simulate(Recost(str(profile)).run(dataclasses.replace(module, cluster=links))).iteration_ms


def report(results: dict) -> None:  # type: ignore[type-arg]
    print(results["cluster"])
    print(f"{'clips  plan':49s}measured ms (min .. max)      predicted  error   uplinks MB by program")
    rows = sorted(results["plans"], key=lambda row: statistics.median(row["measured_ms"]))
    medians = [statistics.median(row["measured_ms"]) for row in rows]
    errors = [row["predicted_ms"] / median - 1 for row, median in zip(rows, medians, strict=True)]
    for row, median, error in zip(rows, medians, errors, strict=True):
        low, high = min(row["measured_ms"]), max(row["measured_ms"])
        print(
            f"{row['clips']:5s}  {named(row['plans']):40s}  {median:8.1f} ({low:7.1f} .. {high:7.1f})  "
            f"{row['predicted_ms']:8.1f}  {100 * error:+5.1f} %  {row['uplink_bytes'] / 1e6:6.2f}  "
            f"{row['program_bytes'] / 1e6:6.2f}"
        )
    for (mix, schedule), (aware, blind) in compared(rows).items():
        ratios = [a / b for a, b in zip(aware["measured_ms"], blind["measured_ms"], strict=True)]
        print(
            f"{mix:5s}  {schedule:12s}  aware / blind: measured {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} .. {max(ratios):.3f}), predicted {aware['predicted_ms'] / blind['predicted_ms']:.3f}"
        )
    tau = kendalltau([row["predicted_ms"] for row in rows], medians).statistic
    mean, worst = statistics.mean(map(abs, errors)), max(map(abs, errors))
    print(
        f"{len(rows)} different plans, error of the prediction: mean {100 * mean:.1f} %, worst {100 * worst:.1f} %; "
        f"Kendall's tau {tau:.2f}"
    )
    for mix in MIXES:
        every = zip(*(row["losses"] for row in rows if row["clips"] == mix), strict=True)
        print(f"{mix}: largest relative difference of the losses: {max(max(at) / min(at) - 1 for at in every):.1e}")


def named(plans: list[list[str]]) -> str:
    """``z3 aware blind, flexsp blind``."""
    places: dict[str, list[str]] = defaultdict(list)
    for schedule, place in plans:
        places[schedule].append(place)
    return ", ".join(" ".join([schedule, *ranks]) for schedule, ranks in places.items())


def compared(rows: list[dict]) -> dict[tuple[str, str], tuple[dict, dict]]:  # type: ignore[type-arg]
    """The rows of both placements of every schedule that they place differently."""
    of = {(row["clips"], schedule, place): row for row in rows for schedule, place in row["plans"]}
    both = {(mix, schedule): (of[mix, schedule, "aware"], of[mix, schedule, "blind"]) for mix, schedule, _ in of}
    return {key: (aware, blind) for key, (aware, blind) in sorted(both.items()) if aware is not blind}


if __name__ == "__main__":
    main()
