"""Models that their devices do not hold, planned with host memory: what lies there, what crosses, what a step takes.

Stages as traced (``benchmarks/data``), one clip a step, the default pipeline, its programs checked and simulated::

    python benchmarks/sharded/host_memory.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Clip, Level, Module, quantity
from arachnec.ir.parser import parse_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.verification.host_memory import host_peak
from arachnec.views.host_memory import host_sentences

ROOT = Path(__file__).parents[2]
DEFAULT = "choose-layout,offload{what=WHAT},partition,annotate,schedule-z3{steps=50}"
END = "place,bucket,lower,check"


@dataclass(frozen=True)
class Row:
    model: str
    cluster: str  # of `examples/clusters`
    clip: tuple[int, int, int, int]  # frames, height, width, tokens
    what: str = "auto"
    host: bool = True


SHORT, LONG = (49, 480, 832, 20280), (81, 480, 832, 32760)
ROWS = (
    Row("wan2_1_14b_lora", "one_24g", SHORT),
    Row("wan2_1_14b_lora", "one_24g", SHORT, "inputs"),
    Row("wan2_1_14b_lora", "one_24g", LONG),
    Row("wan2_1_14b", "one_h100_512g", LONG),
    Row("wan2_1_14b", "one_h100_512g", LONG, "inputs"),
    Row("wan2_1_14b", "one_h100_512g", LONG, host=False),
)


def module_of(row: Row) -> Module:
    cluster = parse_cluster(ROOT / "examples" / "clusters" / f"{row.cluster}.toml")
    if not row.host:
        cluster = replace(cluster, attrs=cluster.attrs.updated(host_memory=None, pcie=None))
    stages = parse_file(ROOT / "benchmarks" / "data" / f"{row.model}.cascade").stages
    frames, height, width, tokens = row.clip
    clips = (Clip(0, frames, height, width, 512, tokens),)
    return Module(row.model, Level.TRACED, cluster, clips, stages)


def report(row: Row) -> None:
    print(f"## {row.model}, {'x'.join(map(str, row.clip[:3]))}, {row.cluster}, offload{{what={row.what}}}", end="")
    print("" if row.host else ", without host memory")
    try:
        planned = Pipeline.parse(f"{DEFAULT.replace('WHAT', row.what)},{END}").run(module_of(row))
    except UserError as error:
        print(*(f"    {line}" for problem in error.diagnostics for line in render(problem).splitlines()), sep="\n")
        return
    result, (program,) = simulate(planned), planned.programs
    state, inputs = host_peak(program, {cascade.name: cascade for cascade in planned.cascades})
    cascade = planned.cascades[0]
    recomputed = CostModel(planned).recomputed(cascade)
    print(f"    step {result.iteration_ms / 1e3:.2f} s; cascade {(cascade.end - cascade.start) / 1e3:.2f} s, ", end="")
    print(f"{recomputed} blocks recomputed; host {state + inputs:.1f} GiB, ", end="")
    print(f"device {quantity(program.attrs['state']) + quantity(cascade.attrs['memory']):.1f} GiB")
    for sentence in host_sentences(planned, CostModel(planned)):
        print(f"    {sentence}")


def main() -> None:
    for row in ROWS:
        report(row)


if __name__ == "__main__":
    main()
