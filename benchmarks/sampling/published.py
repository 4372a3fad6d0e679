"""HunyuanVideo's published times on 1 to 8 GPUs of three kinds, as a plan of one request in the simulator.

    python benchmarks/sampling/published.py [--json results.json]

The numbers and the fit are those of `benchmarks/published_scaling.py`: seconds as xDiT publishes them, 129 frames, 50
steps, batch 1, one number a kind and resolution fitted on one GPU. Here each is a request with a decoder, planned as
`one-degree` and simulated: 50 steps of a segment on all ranks by Ulysses, then a decode on one. The model is the traced
one of `benchmarks/data`. Ends with 1 where a prediction but those that are named as outside is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.data.requests import Request
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Stage
from arachnec.ir.parser import parse_file
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.sampling.requests import inference_stage, sampling_module
from benchmarks.published_scaling import EXPECTED_OUTSIDE, FRAMES, LIMIT, PUBLISHED, STEPS, TEXT, decode_seconds, fitted

TOKENS = 118_800  # of both resolutions
DATA = Path(__file__).parents[1] / "data" / "hunyuanvideo.cascade"


@dataclass(frozen=True)
class Row:
    """Seconds of one video: published, and simulated."""

    resolution: str
    device: str
    degree: int
    published: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.published - 1


def module_of(dit: Stage, cluster: Cluster, sustained: float, decode: float, height: int, width: int) -> Module:
    """One request; the decoder takes its seconds whatever the ranks, as a product of so many TFLOP."""
    work = Formula((Term(decode * sustained, (("B", 1),)),), "TFLOP")
    vae = Stage("vae", False, Attributes.of(flops=work, state=Quantity(0.5, "GiB")))
    cluster = replace(cluster, attrs=cluster.attrs.updated(flops=Quantity(sustained, "TFLOP/s")))
    request = Request("0", "a", FRAMES, height, width, steps=STEPS, text_tokens=TEXT)
    return sampling_module([request], lambda _: TOKENS, (dit, vae), ("dit",), cluster, decoder="vae")


def rows() -> Iterator[Row]:
    traced = next(stage for stage in parse_file(DATA).stages if stage.trained)
    dit = inference_stage(replace(traced, name="dit"), 256.0)
    for (height, width), devices in PUBLISHED.items():
        for device, published in devices.items():
            decode = decode_seconds(device, height, width)
            one = Cascade("0", Phase.DENOISE, "dit", (0,), 1, TOKENS, TEXT)
            sustained = fitted(dit, parse_cluster(f"8:{device}"), one, (published[1] - decode) / STEPS)
            for degree, seconds in published.items():
                ulysses = replace(dit, attrs=dit.attrs.updated(degrees=(degree,)))
                cluster = parse_cluster(f"{degree}:{device}")
                module = module_of(ulysses, cluster, sustained, decode, height, width)
                passes = "segment,annotate,schedule-sampling{policy=one-degree},place,lower,check"
                simulated = simulate(Pipeline.parse(passes).run(module)).makespan_ms / 1e3
                yield Row(f"{width}x{height}", device, degree, seconds, simulated)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    listed: list[Row] = []
    print("resolution     device GPUs  published  simulated   error")
    for row in rows():
        listed.append(row)
        mark = "  outside 10 %" if abs(row.error) > LIMIT else ""
        shown = f"{row.published:>9.1f} {row.simulated:>10.1f} {row.error:>+7.1%}{mark}"
        print(f"{row.resolution:>10} {row.device:>10} {row.degree:>4}  {shown}")
    if arguments.json:
        text = json.dumps([asdict(row) | {"error": row.error} for row in listed], indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    predicted = [row for row in listed if row.degree > 1]
    outside = [row for row in predicted if abs(row.error) > LIMIT]
    print(f"{len(predicted) - len(outside)} of {len(predicted)} predictions are within 10 %")
    return int(any((row.device, row.degree) not in EXPECTED_OUTSIDE for row in outside))


if __name__ == "__main__":
    sys.exit(main())
