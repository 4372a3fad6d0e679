"""What gathering updated parameters behind the next step saves: simulated iterations of HunyuanVideo on 8x8 H100.

The optimizer's state is dealt out over all ranks (stages as traced, ``benchmarks/data``). Each row plans equal clips
once and simulates the program twice: as lowered, gathers layer by layer at its beginning, and with the time of all
gathers in the optimizer's step, where every rank waits for them. With ``--encoder`` the VAE of Wan2.1, whose
compression is the same, encodes each clip first::

    python benchmarks/sharded/overlapped_gathers.py --encoder
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Clip, Instruction, Level, Module, Program, Stage, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Quantity
from arachnec.passes.infra.pipeline import Pipeline

DATA = Path(__file__).parents[1] / "data"
SHAPES = ((17, 480, 832, 7800), (33, 480, 832, 14040), (17, 720, 1280, 18000), (81, 480, 832, 32760))
COUNT = 64


def planned(model: str, cluster: str, shape: tuple[int, int, int, int], encoder: bool, steps: int) -> Module:
    stages = stages_in(model)
    if encoder:
        stages = (*(stage for stage in stages_in("wan2_1_1_3b_vae") if not stage.trained), *stages)
    frames, height, width, tokens = shape
    clips = tuple(Clip(number, frames, height, width, 512, tokens) for number in range(COUNT))
    module = Module(model, Level.TRACED, parse_cluster(cluster), clips, stages)
    passes = f"shard-optimizer,partition,annotate,schedule-z3{{steps={steps}}},place,bucket,lower,check"
    return Pipeline.parse(passes).run(module)


def stages_in(name: str) -> tuple[Stage, ...]:
    return parse_module((DATA / f"{name}.cascade").read_text(encoding="utf-8"), name).stages


def gathered_at_the_end(module: Module) -> Module:
    """The same program whose steps end with all that its gathers take."""
    return replace(module, programs=tuple(map(_at_the_end, module.programs)))


def _at_the_end(program: Program) -> Program:
    times = {s.target: quantity(s.attrs["time"]) for s in program.instructions if s.op == "gather"}

    def longer(step: Instruction) -> Instruction:
        if step.op != "step" or step.target not in times:
            return step
        time = Quantity(quantity(step.attrs["time"]) + times[step.target], "ms")
        return replace(step, attrs=step.attrs.updated(time=time))

    return replace(program, instructions=tuple(longer(step) for step in program.instructions if step.op != "gather"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hunyuanvideo")
    parser.add_argument("--cluster", default="8x8:h100-80g")
    parser.add_argument("--encoder", action="store_true")
    parser.add_argument("--steps", type=int, default=50, help="of the scheduler")
    options = parser.parse_args()
    print("| clips | gathers, s | iteration, gathers at its end, s | layer by layer, s | saved |")
    print("|---|---|---|---|---|")
    for shape in SHAPES:
        module = planned(options.model, options.cluster, shape, options.encoder, options.steps)
        gathers = [s for s in module.programs[0].instructions if s.op == "gather"]
        total = sum(quantity(gather.attrs["time"]) for gather in gathers) / 1e3
        before, after = (simulate(m).iteration_ms / 1e3 for m in (gathered_at_the_end(module), module))
        what = f"{COUNT} x {'x'.join(map(str, shape[:3]))}"
        print(f"| {what} | {total:.2f} | {before:.2f} | {after:.2f} | {1 - after / before:.1%} |", flush=True)


if __name__ == "__main__":
    main()
