"""What each decision of the planner is worth: switched off alone, on the same clips and costs, simulated.

    python benchmarks/ablations.py [--only encoders,degrees] [--steps 2000]

One row a decision and workload: the iteration with everything on, the iteration without this decision, and their
ratio. Every decision has a workload where it matters and one where it does not. The
effort of searches is counted in steps, so that a loaded machine finds the same. Ratios within a percent of 1 say
nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

from traced_stages import clip, module_of, video_mix

from arachnec.backends.simulator import simulate
from arachnec.cost.memory import Memory
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase
from arachnec.ir.stage_sizes import block_count
from arachnec.ir.values import Formula, Quantity, Value
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.placement import best_placements, on_ranks

RECOMPUTE_AT = Memory.recompute_at
STEPS = 2000  # about the ms of the scheduler's default budget
COSTED = "shard-optimizer,partition,annotate"
SINGLE = "shard-optimizer,partition{policy=single},annotate"


@dataclass(frozen=True)
class Row:
    """ms of one iteration with the decision and without it; None where it cannot run without."""

    decision: str
    workload: str
    without: str
    on: float
    off: float | None


@dataclass(frozen=True)
class Planner:
    """The default pipeline from the scheduler on, with so many ``steps`` of search."""

    steps: int

    def iteration(self, costed: Module, *, place: str = "place", bucket: bool = True) -> float:
        """Simulated ms of one iteration, planned for this very pipeline."""
        end = f"{place}{',bucket' if bucket else ''},lower,check"
        return simulate(Pipeline.parse(f"{self.scheduler()},{end}").run(costed)).iteration_ms

    def scheduler(self, baselines: bool = True) -> str:
        return f"schedule-z3{{steps={self.steps}{'' if baselines else ',baselines=false'}}}"

    def whole(self, traced: Module, place: str) -> float:
        """Simulated ms of one iteration by the default pipeline with this ``place``, planned for it from the start."""
        others = {step.name: step for step in Pipeline.parse(f"{self.scheduler()},{place}").passes}
        passes = tuple(others.get(step.name, step) for step in Pipeline.parse(PIPELINES["default"]).passes)
        return simulate(Pipeline(passes).run(traced)).iteration_ms

    def scheduled(self, costed: Module, *, baselines: bool = True) -> Module:
        return Pipeline.parse(self.scheduler(baselines)).run(costed)


def simulated(placed: Module) -> float:
    """ms of one iteration, from a placed module, by the default pipeline's own end."""
    after = tuple(step for step in Pipeline.parse(PIPELINES["default"]).passes if step.needs >= placed.level)
    return simulate(Pipeline(after).run(placed)).iteration_ms


def costed(model: str, clips: tuple[Clip, ...], cluster: str, passes: str = COSTED) -> Module:
    return Pipeline.parse(passes).run(module_of(model, clips, cluster))


def with_stage(module: Module, **attrs: Value | None) -> Module:
    """Other attributes for the trained stage."""
    stages = [replace(s, attrs=s.attrs.updated(**attrs)) if s.trained else s for s in module.stages]
    return replace(module, stages=tuple(stages))


# -- workloads ---------------------------------------------------------------------------------------------------------


def long_clips(count: int) -> tuple[Clip, ...]:
    """720p, 41 to 121 frames, in turn."""
    return tuple(clip(number, 41 + 16 * (number % 6), 720, 1280) for number in range(count))


def short_clips(count: int) -> tuple[Clip, ...]:
    """480p, 17 frames."""
    return tuple(clip(number, 17, 480, 832) for number in range(count))


# -- decisions ---------------------------------------------------------------------------------------------------------


def degrees(planner: Planner) -> Iterator[Row]:
    for workload, clips in (
        ("9 clips of 720p, HunyuanVideo, 8x8 H100", long_clips(9)),
        ("64 clips of 720p, HunyuanVideo, 8x8 H100", long_clips(64)),
        ("512 clips of the mix, HunyuanVideo, 8x8 H100", video_mix(512, 0)),
    ):
        module = costed("hunyuanvideo", clips, "8x8:h100-80g")
        on = planner.iteration(module)
        for most in (8, 16, 32) if len(clips) == 9 else (8,):
            limited = with_stage(module, degrees=tuple(range(1, most + 1)))
            yield Row("degrees above one node", workload, f"degree at most {most}", on, planner.iteration(limited))


def encoders(planner: Planner) -> Iterator[Row]:
    for workload, clips in (
        ("8 clips of 720p, Wan2.1 1.3B and its VAE, 2x8 H100", long_clips(8)),
        ("32 clips of the mix, Wan2.1 1.3B and its VAE, 2x8 H100", video_mix(32, 0)),
        ("512 clips of the mix, Wan2.1 1.3B and its VAE, 2x8 H100", video_mix(512, 0)),
    ):
        module = costed("wan2_1_1_3b_vae", clips, "2x8:h100-80g")
        off = planner.iteration(encoded_in_place(module))
        without = "every encoder on its consumer's GPUs, right before"
        yield Row("encoders off the critical path", workload, without, planner.iteration(module), off)


def encoded_in_place(module: Module) -> Module:
    """Encoders as a part of what reads them: their time at the best degree within the group is added to it."""
    cost = CostModel(module)
    named = {cascade.name: cascade for cascade in module.cascades}

    def joined(cascade: Cascade) -> Cascade:
        times: list[Value] = []
        for degree, ms in cost.options(cascade).items():
            within = [
                [t for d, t in cost.options(named[name]).items() if d <= degree]  # none: so few GPUs do not hold it
                for name in cascade.inputs
            ]
            if all(within):
                times.append((degree, Quantity(ms + sum(map(min, within)), "ms")))
        return replace(cascade, inputs=(), attrs=cascade.attrs.updated(times=tuple(times)))

    trained = tuple(joined(cascade) for cascade in module.cascades if cascade.phase is Phase.TRAIN)
    return replace(module, cascades=trained)


def recomputation(planner: Planner) -> Iterator[Row]:
    for workload, clips, model, cluster in (
        ("24 clips of 720p, Wan2.1 14B, 4x8 H100", long_clips(24), "wan2_1_14b", "4x8:h100-80g"),
        ("256 clips of the mix, Wan2.1 14B, 4x8 H100", video_mix(256, 0), "wan2_1_14b", "4x8:h100-80g"),
        (
            "128 clips of the mix, Wan2.1 1.3B and its VAE, 2x8 H100",
            video_mix(128, 0),
            "wan2_1_1_3b_vae",
            "2x8:h100-80g",
        ),
    ):
        module = costed(model, clips, cluster, SINGLE)
        on = planner.iteration(module)
        for without, changed in (
            ("all cascades recompute", all_recomputed(module)),
            ("none can", with_stage(module, saved_recompute=None)),
        ):
            try:
                off: float | None = planner.iteration(changed)
            except UserError:
                off = None
            yield Row("recomputation per cascade", workload, without, on, off)
        with patch.object(Memory, "recompute_at", all_or_none):
            off = planner.iteration(module)
        yield Row("recomputation per cascade", workload, "all blocks of a cascade or none", on, off)


def all_or_none(
    memory: Memory, cascade: Cascade, degree: int, ranks: Sequence[int] | None = None, side: int = 1
) -> int | None:
    """All blocks where the cascade must recompute some."""
    blocks = RECOMPUTE_AT(memory, cascade, degree, ranks, side)
    return blocks and block_count(memory.stages[cascade.stage])


def all_recomputed(module: Module) -> Module:
    """A stage whose backward always begins with another forward, and which keeps only what that needs."""
    stage = next(stage for stage in module.stages if stage.trained)
    forward, backward = stage.attrs["forward"], stage.attrs["backward"]
    assert isinstance(forward, Formula) and isinstance(backward, Formula)
    longer = Formula((*backward.terms, *forward.terms), "ms")
    return with_stage(module, saved=stage.attrs["saved_recompute"], saved_recompute=None, backward=longer)


def placement(planner: Planner) -> Iterator[Row]:
    racks = "examples/clusters/two_tier_h100x64.toml"
    for workload, clips, cluster in (
        ("48 clips of 720p, HunyuanVideo, 8x8 H100", long_clips(48), "8x8:h100-80g"),
        ("48 clips of 720p, HunyuanVideo, 2 racks of 4x8 H100", long_clips(48), racks),
        ("256 clips of the mix, HunyuanVideo, 2 racks of 4x8 H100", video_mix(256, 0), racks),
        ("256 clips of 17 frames of 480p, HunyuanVideo, 8x8 H100", short_clips(256), "8x8:h100-80g"),
    ):
        traced = module_of("hunyuanvideo", clips, cluster)
        on, off = (planner.whole(traced, place) for place in ("place", "place{topology=false}"))
        yield Row("placement by topology", workload, "any free ranks, spread over the nodes", on, off)


def layouts(planner: Planner) -> Iterator[Row]:
    for workload, clips, cluster in (
        ("9 clips of 720p, HunyuanVideo, 2x8 H100", long_clips(9), "2x8:h100-80g"),
        ("48 clips of 720p, HunyuanVideo, 8x8 H100", long_clips(48), "8x8:h100-80g"),
        ("256 clips of the mix, HunyuanVideo, 8x8 H100", video_mix(256, 0), "8x8:h100-80g"),
    ):
        module = costed("hunyuanvideo", clips, cluster)
        on, off = (
            simulated(Pipeline.parse("place").run(planner.scheduled(module, baselines=baselines)))
            for baselines in (True, False)
        )
        yield Row("the baselines' layouts", workload, "they are not tried", on, off)


def locality(planner: Planner) -> Iterator[Row]:
    for workload, clips, cluster in (
        ("32 clips of the mix, Wan2.1 1.3B and its VAE, 2x8 H100", video_mix(32, 0), "2x8:h100-80g"),
        (
            "12 clips of the mix, Wan2.1 1.3B and its VAE, 8x1 H100 on 1 Gbit/s",
            video_mix(12, 3),
            "benchmarks/data/h100x8_ethernet.toml",
        ),
    ):
        schedule = planner.scheduled(costed("wan2_1_1_3b_vae", clips, cluster, SINGLE))
        without = "ranks chosen without regard to where inputs are"
        on, off = simulated(Pipeline.parse("place").run(schedule)), simulated(anywhere(schedule))
        yield Row("handoff locality", workload, without, on, off)


def anywhere(schedule: Module) -> Module:
    """The schedule on ranks that ``place`` would choose if it did not see inputs."""
    cost = CostModel(schedule)
    unaware = best_placements([replace(cascade, inputs=()) for cascade in schedule.cascades], cost)
    named = {c.name: c for c in on_ranks(schedule.cascades, cost, {c.name: c.ranks for c in unaware})}
    everyone = tuple(range(cost.cluster.world))
    return replace(
        schedule,
        level=Level.PLACED,
        cascades=tuple(named[cascade.name] for cascade in schedule.cascades),
        reductions=tuple(replace(r, attrs=r.attrs.updated(ranks=everyone)) for r in schedule.reductions),
        attrs=schedule.attrs.updated(makespan=Quantity(max(c.end for c in named.values()), "ms"), proved=False),
    )


def overlap(planner: Planner) -> Iterator[Row]:
    for workload, clips in (
        ("32 clips of the mix, Wan2.1 14B, 4x8 H100", video_mix(32, 0)),
        ("512 clips of the mix, Wan2.1 14B, 4x8 H100", video_mix(512, 0)),
    ):
        module = costed("wan2_1_14b", clips, "4x8:h100-80g")
        off = planner.iteration(module, bucket=False)
        without = "one all-reduce after the last cascade"
        yield Row("gradient all-reduce behind the backward", workload, without, planner.iteration(module), off)


DECISIONS: dict[str, Callable[[Planner], Iterator[Row]]] = {
    "degrees": degrees,
    "encoders": encoders,
    "recomputation": recomputation,
    "placement": placement,
    "locality": locality,
    "overlap": overlap,
    "baselines": layouts,
}


def line(row: Row) -> str:
    """A row of the table in docs/planning.md."""
    off = f"{row.off / 1e3:.3f}" if row.off is not None else "cannot run"
    worth = f"{row.off / row.on:.3f}" if row.off is not None else "-"
    return f"| {row.decision} | {row.workload} | {row.without} | {row.on / 1e3:.3f} | {off} | {worth} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DECISIONS), help="names separated by commas")
    parser.add_argument("--steps", type=int, default=STEPS, help="of search for every plan")
    options = parser.parse_args()
    started = time.perf_counter()
    print("| decision | workload | without it | with, s | without, s | ratio |\n|---|---|---|---|---|---|")
    for name in options.only.split(","):
        for row in DECISIONS[name](Planner(options.steps)):
            print(line(row), flush=True)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
