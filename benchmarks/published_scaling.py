"""HunyuanVideo's published Ulysses scaling, predicted from its time on one GPU of each kind.

    python benchmarks/published_scaling.py [--json results.json]

129 frames, 50 steps, batch 1, at 1280x720 and 960x960 (both 118,800 tokens): seconds as xDiT publishes them
(github.com/xdit-project/xDiT, docs/performance/hunyuanvideo.md; H100 and H20 with the model's own code, L20 with
Diffusers). Per kind and resolution one number is fitted, the sustained TFLOP/s, so that one GPU takes what is
published; everything else is the compiler's: the traced model's FLOPs and attention traffic, `arachnec.cost.model`,
and links from the device specs.

A published time is that of a whole clip: 50 forwards of the transformer, and one VAE decode, which xDiT does not divide
(github.com/xdit-project/DistVAE, pull request 10: "replicated among GPUs"). The decode's time is not fitted to this
table: a tiled decode of 848x480, 77 frames took 5.713 s on one H200 (github.com/sgl-project/sglang, pull request
36012), taken here in proportion to pixels and to the device specs' peaks.

Ends with 1 where a prediction outside ``EXPECTED_OUTSIDE`` is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from arachnec.cluster.device_specs import DEVICE_SPECS
from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Phase, Stage
from arachnec.models.file import load_model_file
from arachnec.passes.annotate import from_device_specs
from arachnec.passes.trace import trace_model

MODEL = Path(__file__).parents[1] / "examples" / "hunyuanvideo.py"
FRAMES, STEPS, TEXT = 129, 50, 256
LIMIT = 0.10

PUBLISHED: dict[tuple[int, int], dict[str, dict[int, float]]] = {
    (720, 1280): {
        "h100-80g": {1: 1904.08, 2: 925.04, 4: 514.08, 8: 337.58},
        "h20-96g": {1: 6639.17, 2: 3400.55, 4: 1762.86, 8: 940.97},
        "l20-48g": {1: 6043.88, 2: 3271.44, 4: 2080.05},
    },
    (960, 960): {
        "h100-80g": {1: 1735.01, 2: 934.09, 3: 645.45, 6: 367.02},
        "h20-96g": {1: 6621.46, 2: 3400.55, 3: 2310.48, 6: 1214.67},
        "l20-48g": {1: 6039.08, 2: 3260.62, 3: 2284.74},
    },
}
DECODE = ("h200-141g", 848 * 480 * 77, 5.713)  # device, pixels, seconds
# Eight H100 take 78 s more than this model says, six 58 s. The same code on H20, with the same links, shows no such
# rest, so neither links nor undivided work explain it; what does is not in the device specs.
EXPECTED_OUTSIDE = {("h100-80g", 8), ("h100-80g", 6)}


@dataclass(frozen=True)
class Row:
    """Seconds for one clip: published, and predicted with its parts."""

    resolution: str
    device: str
    degree: int
    published: float
    predicted: float
    communication: float
    decode: float
    sustained: float  # TFLOP/s, fitted

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def clip_of(height: int, width: int) -> VideoClip:
    return VideoClip("0", frames=FRAMES, height=height, width=width, text_tokens=TEXT)


def decode_seconds(device: str, height: int, width: int) -> float:
    measured_on, pixels, seconds = DECODE
    peaks = DEVICE_SPECS[measured_on].peak / DEVICE_SPECS[device].peak
    return seconds * FRAMES * height * width / pixels * peaks


def model_of(stage: Stage, cluster: Cluster, sustained: float) -> CostModel:
    """The cost model at so many TFLOP/s; the overhead per block is the device specs'."""
    specs = DEVICE_SPECS[str(cluster.attrs["device"])]
    costed = from_device_specs(stage, sustained, specs.block_overhead)
    return CostModel(Module("published", Level.COSTED, cluster, stages=(costed,)))


def fitted(stage: Stage, cluster: Cluster, cascade: Cascade, seconds: float) -> float:
    """The TFLOP/s at which one forward on one GPU takes so many seconds: time is a constant and work over TFLOP/s."""
    slow, fast = (model_of(stage, cluster, rate).time(cascade, 1) / 1e3 for rate in (1.0, 2.0))
    work = 2 * (slow - fast)
    return work / (seconds - (slow - work))


def rows(stage: Stage, tokens: int, height: int, width: int) -> Iterator[Row]:
    cascade = Cascade("0", Phase.DENOISE, stage.name, (0,), 1, tokens, TEXT)
    for device, published in PUBLISHED[height, width].items():
        cluster = parse_cluster(f"8:{device}")
        decode = decode_seconds(device, height, width)
        sustained = fitted(stage, cluster, cascade, (published[1] - decode) / STEPS)
        cost = model_of(stage, cluster, sustained)
        for degree, seconds in published.items():
            forward = cost.time(cascade, degree, ulysses=degree) / 1e3
            split = Attention(degree, 1)
            sent = cost.communication(cascade, split, tuple(range(degree))) / 1e3 if degree > 1 else 0.0
            predicted = STEPS * forward + decode
            where = f"{width}x{height}"
            yield Row(where, device, degree, seconds, predicted, STEPS * sent, decode, sustained)


def printed(row: Row) -> str:
    mark = "" if abs(row.error) <= LIMIT else "  outside 10 %"
    return (
        f"{row.resolution:>9} {row.device:>9} {row.degree:>3} {row.published:>9.1f} {row.predicted:>9.1f}"
        f" {row.error:>+7.1%} {row.communication:>8.1f} {row.decode:>7.1f} {row.sustained:>8.1f}{mark}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    traced = trace_model(load_model_file(MODEL), [clip_of(*size) for size in PUBLISHED])
    stage = next(stage for stage in traced.stages if stage.trained)
    predictions: list[Row] = []
    print("            seconds:          published predicted   error  of that: links  decode  TFLOP/s")
    for height, width in PUBLISHED:
        for row in rows(stage, traced.tokens(clip_of(height, width)), height, width):
            predictions.append(row)
            print(printed(row))
    if arguments.json:
        text = json.dumps([asdict(row) | {"error": row.error} for row in predictions], indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    predicted = [row for row in predictions if row.degree > 1]
    outside = [row for row in predicted if abs(row.error) > LIMIT]
    print(f"{len(predicted) - len(outside)} of {len(predicted)} predictions are within 10 %")
    return int(any((row.device, row.degree) not in EXPECTED_OUTSIDE for row in outside))


if __name__ == "__main__":
    sys.exit(main())
