"""Plans of requests that arrive over time: mean and 95th percentile of latency, against other ways to serve them.

    python benchmarks/sampling/latency.py [--json results.json] [--seeds 2]

Requests of the sizes of `plans.py` arrive as a Poisson process of so many a second that their least work is 0.5, 0.8
or 0.95 of the GPUs. The planner knows all arrivals. `in_order` is one degree for all in several orders, the best by the
objective, before it is placed; `replica`, `one_degree` and `two_pools` are those pipelines, placed as the search is.
Gaps are to the bound of the objective (`arachnec/solver/latency_bound.py`). Ends with 1 where the search is above any.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from arachnec.cost.model import CostModel
from arachnec.data.requests import Request
from arachnec.ir.nodes import Cascade, Module, quantity
from arachnec.ir.sampling import Objective, objective_ms
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.sampling.chains import Rates, request_chains
from arachnec.planning.sampling.plan import Plan
from arachnec.planning.sampling.policies import in_order_of_length
from benchmarks.sampling.pairs_of_models import WAN, module_of
from benchmarks.sampling.plans import LARGE_STEPS, requests_of

LOADS, GPUS, COUNTS = (0.5, 0.8, 0.95), (8, 32), (32, 128)
OBJECTIVES: tuple[Objective, ...] = ("mean-latency", "p95-latency")
POLICIES = ("replica", "one-degree", "two-pools")


@dataclass(frozen=True)
class Row:
    """Seconds of one instance and objective by policy; ``planning`` is the search's wall time, ``processor`` its
    processor time."""

    requests: int
    gpus: int
    load: float
    seed: int
    objective: str
    bound: float
    search: float
    in_order: float
    replica: float
    one_degree: float
    two_pools: float
    planning: float
    processor: float

    @property
    def gap(self) -> float:
        return self.search / self.bound - 1

    @property
    def best_other(self) -> float:
        return min(self.in_order, self.replica, self.one_degree, self.two_pools)


def arriving(requests: list[Request], cluster: str, gpus: int, load: float, seed: int) -> list[Request]:
    """Requests with arrivals at which their least work is so large a part of the GPUs."""
    costed = Pipeline.parse("segment,annotate").run(module_of(WAN, requests, cluster, LARGE_STEPS))
    chains = request_chains(costed, Rates(CostModel(costed), down=True))
    assert not isinstance(chains, Cascade), "every request fits"
    seconds = sum(one.chain.least_area(math.inf) for one in chains) / len(chains) / 1e6
    rng, moment, rows = random.Random(seed), 0.0, []
    for request in requests:
        rows.append(replace(request, arrival=round(moment, 3)))
        moment += rng.expovariate(load * gpus / seconds)
    return rows


def value(module: Module, objective: Objective) -> float:
    """Seconds of a placed plan."""
    return objective_ms(module, {cascade.name: cascade.end for cascade in module.cascades}, objective) / 1e3


def in_order(module: Module, objective: Objective) -> float:
    """The best of one degree for all in several orders."""
    cost = CostModel(module)
    rates = Rates(cost, {cascade.stage for cascade in module.cascades})
    requests = request_chains(module, rates)
    assert not isinstance(requests, Cascade), "every request fits"
    ways = in_order_of_length([one.chain for one in requests], cost.cluster.world, cost.cluster.gpus)
    best = min((Plan(requests, pieces, rates) for pieces in ways), key=lambda plan: plan.value(objective))
    return best.value(objective) / 1e6


def rows_of(count: int, gpus: int, load: float, seed: int) -> Iterator[Row]:
    cluster = f"{gpus // 8}x8:h100-80g"
    requests = arriving(requests_of(count, seed), cluster, gpus, load, seed)
    module = Pipeline.parse("segment,annotate").run(module_of(WAN, requests, cluster, LARGE_STEPS))
    placed = {policy: Pipeline.parse(f"schedule-sampling{{policy={policy}}},place").run(module) for policy in POLICIES}
    for objective in OBJECTIVES:
        begin, cpu = time.perf_counter(), time.process_time()
        planned = Pipeline.parse(f"schedule-sampling{{objective={objective}}}").run(module)
        planning, processor = time.perf_counter() - begin, time.process_time() - cpu
        search = Pipeline.parse("place").run(planned)
        others = (value(placed[policy], objective) for policy in POLICIES)
        bound = quantity(search.attrs["bound"]) / 1e3
        yield Row(
            count, gpus, load, seed, objective, bound, value(search, objective), in_order(module, objective), *others,
            planning, processor,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--seeds", type=int, default=2, help="instances of every size and load")
    arguments = parser.parse_args()
    rows: list[Row] = []
    print("objective     requests GPUs load seed  bound s  search s     gap  in order  replica  one-degree  two-pools"
          "  planning s  (processor)")  # fmt: skip
    for gpus in GPUS:
        for count in COUNTS:
            for load in LOADS:
                for seed in range(arguments.seeds):
                    for row in rows_of(count, gpus, load, seed):
                        rows.append(row)
                        others = (row.in_order, row.replica, row.one_degree, row.two_pools)
                        times = "  ".join(f"{other / row.search:>7.2f}x" for other in others)
                        took = f"{row.planning:>10.2f} {row.processor:>9.2f}"
                        print(
                            f"{row.objective:>12} {count:>9} {gpus:>4} {load:>4} {seed:>4} {row.bound:>8.1f}"
                            f" {row.search:>9.1f} {row.gap:>7.1%}  {times}  {took}",
                            flush=True,
                        )
    if arguments.json:
        text = json.dumps([asdict(row) | {"gap": row.gap} for row in rows], indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    for objective in OBJECTIVES:
        for gpus in GPUS:
            for load in LOADS:
                own = [row for row in rows if (row.objective, row.gpus, row.load) == (objective, gpus, load)]
                gaps, wins = [row.gap for row in own], [row.in_order / row.search for row in own]
                print(
                    f"{objective} {gpus} GPUs load {load}: gap median {statistics.median(gaps):.1%}, largest "
                    f"{max(gaps):.1%}; one degree in order takes {statistics.median(wins):.2f} times as long (median)"
                )
    above = [row for row in rows if row.search > row.best_other * (1 + 1e-3)]
    print(f"above another: {len(above)} of {len(rows)}")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
