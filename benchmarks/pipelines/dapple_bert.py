"""BERT-48 on two machines of eight V100: DAPPLE's published plan, its neighbours, and what the planners find.

    python -m benchmarks.pipelines.dapple_bert

Latency by DAPPLE's formula, profile from its artifact. Below, the two-stage plan's micro-batches in GPipe's order and
in DAPPLE's: makespan and the micro-batches that a device holds at most, simulated.
"""

from __future__ import annotations

import click

from arachnec.pipelining.evaluate import StageTimes, evaluate, held
from arachnec.pipelining.hybrid_plan import HybridPlan, Instance, Stage, hybrid_plan
from arachnec.pipelining.hybrid_search import best_plan, dapple_plan, pipedream_plan
from arachnec.pipelining.schedules import dapple, gpipe
from tests.pipelining.bert_profile import bert_instance


def two_stages(instance: Instance, last: int) -> HybridPlan:
    cut = [layer.name for layer in instance.profile.layers].index(f"layer_{last}") + 1
    return hybrid_plan(instance, (Stage(0, cut, (8, 0)), Stage(cut, instance.layers, (0, 8))))


@click.command()
def main() -> None:
    instance = bert_instance()
    plans = [(f"8:8, cut after layer_{last}", two_stages(instance, last)) for last in (23, 22, 24, 21)]
    plans += [
        ("smallest block (DAPPLE's program)", dapple_plan(instance)),
        ("PipeDream's partition", pipedream_plan(instance)),
        ("least latency (ours)", best_plan(instance)),
        ("least latency, copies of pipelines too", best_plan(instance, (1, 2, 4, 8, 16))),
    ]
    click.echo(f"{'plan':40}{'block ms':>10}{'latency ms':>12}{'speed-up':>10}  stages")
    for name, plan in plans:
        click.echo(f"{name:40}{plan.block:10.3f}{plan.latency:12.1f}{plan.speed_up:10.2f}  {plan}")
    plan = plans[0][1]
    layers, m = instance.profile.layers, plan.micro_batches

    def table(name: str) -> list[list[float]]:
        rows = [sum(getattr(layer, name) for layer in layers[s.first : s.last]) / s.replicas for s in plan.stages]
        return [[row] * m for row in rows]

    times = StageTimes(table("forward"), table("backward"), [[0.0] * m] * len(plan.stages))
    click.echo(f"\n{'order of 8:8':40}{'makespan ms':>12}{'held':>10}")
    for name, schedule in (("gpipe", gpipe(2, m)), ("dapple, policy A", dapple(2, m)), ("policy B", dapple(2, m, "B"))):
        most = "/".join(map(str, held(schedule, ((1,) * m,) * 2)))
        click.echo(f"{name:40}{evaluate(schedule, times).makespan:12.1f}{most:>10}")


if __name__ == "__main__":
    main()
