"""Plans of 8 to 256 requests on 8 to 64 GPUs: gap to the bound after a second, against other ways to serve them.

    python benchmarks/sampling/plans.py [--json results.json] [--seeds 3]

Requests are of six sizes, from an image at 720p to 81 frames of it, 50 steps with guidance, 13 of them Wan2.1-14B's
and the others the 1.3B's. The bound holds for every schedule of whole steps, whatever degrees and borders
(`arachnec/solver/malleable.py`); gaps are of the schedule as placed on ranks. Ends with 1 where the median gap is above
2 %, or the search is above `two-pools` anywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from arachnec.data.requests import Request
from arachnec.ir.nodes import Module, quantity
from arachnec.passes.infra.pipeline import Pipeline
from benchmarks.sampling.pairs_of_models import WAN, module_of

SIZES = ((1, 720, 1280), (17, 256, 256), (49, 256, 256), (49, 480, 832), (81, 480, 832), (81, 720, 1280))
COUNTS, GPUS = (8, 16, 32, 64, 128, 256), (8, 16, 32, 64)
LARGE_STEPS, LIMIT = 13, 0.02


@dataclass(frozen=True)
class Row:
    """Seconds of one instance by policy; ``planning`` is the search's wall time, ``processor`` its processor time."""

    requests: int
    gpus: int
    seed: int
    bound: float
    search: float
    two_pools: float
    replica: float
    one_degree: float
    planning: float
    processor: float

    @property
    def gap(self) -> float:
        return self.search / self.bound - 1


def requests_of(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    sizes = [rng.choice(SIZES) for _ in range(count)]
    return [Request(str(n), "a", *size, steps=50, guidance=5.0, text_tokens=256) for n, size in enumerate(sizes)]


def makespan(module: Module, policy: str) -> float:
    planned = Pipeline.parse(f"schedule-sampling{{policy={policy}}},place").run(module)
    return quantity(planned.attrs["makespan"]) / 1e3


def row_of(count: int, gpus: int, seed: int) -> Row:
    traced = module_of(WAN, requests_of(count, seed), f"{gpus // 8}x8:h100-80g", LARGE_STEPS)
    module = Pipeline.parse("segment,annotate").run(traced)
    begin, cpu = time.perf_counter(), time.process_time()
    planned = Pipeline.parse("schedule-sampling").run(module)
    planning, processor = time.perf_counter() - begin, time.process_time() - cpu
    placed = Pipeline.parse("place").run(planned)
    others = {policy: makespan(module, policy) for policy in ("two-pools", "replica", "one-degree")}
    bound, search = (quantity(placed.attrs[name]) / 1e3 for name in ("bound", "makespan"))
    return Row(count, gpus, seed, bound, search, *others.values(), planning, processor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--seeds", type=int, default=3, help="instances of every size")
    arguments = parser.parse_args()
    rows: list[Row] = []
    print("requests GPUs seed   bound s     gap  two-pools  replica  one-degree  planning s  (processor)")
    for count in COUNTS:
        for gpus in GPUS:
            for seed in range(arguments.seeds):
                rows.append(row := row_of(count, gpus, seed))
                others = (f"{value / row.search:>8.2f}x" for value in (row.two_pools, row.replica, row.one_degree))
                print(
                    f"{count:>8} {gpus:>4} {seed:>4} {row.bound:>9.1f} {row.gap:>7.2%}  {' '.join(others)}"
                    f"  {row.planning:>9.2f} {row.processor:>11.2f}",
                    flush=True,
                )
    if arguments.json:
        text = json.dumps([asdict(row) | {"gap": row.gap} for row in rows], indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    median = statistics.median(row.gap for row in rows)
    above = [row for row in rows if row.search > row.two_pools * (1 + 1e-6)]
    print(f"median gap {median:.2%}, largest {max(row.gap for row in rows):.2%}; above two-pools: {len(above)}")
    return int(median > LIMIT or bool(above))


if __name__ == "__main__":
    sys.exit(main())
