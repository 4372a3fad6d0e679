"""What a step costs: FLOPs of one forward as traced, of the pairs that SRDiffusion (arXiv 2505.19151) samples with.

    python -m benchmarks.sampling.flops [FILE.json]

Beside them stand constants by formula: 8 + 4 ffn/h products of S h^2 and 4 S^2 h a layer, no text, no shell. The trace
counts both. K is how many of 50 steps the large model may take for a speed-up that FLOPs alone would allow.
"""

import json
import sys
from pathlib import Path

from arachnec.data.clip import VideoClip
from arachnec.ir.values import Formula
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.trace import TRAINED, trace_model

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 50
# file, clip, TFLOP by formula of each model, speed-ups to ask K for
PAIRS = (
    ("sample_wan2_1.py", (81, 480, 832, 512), {"large": 1525.0, "small": 270.5}, (2.0, 3.0, 4.0)),
    ("sample_cogvideox.py", (49, 480, 720, 226), {"large": 332.2, "small": 120.0}, (1.5, 2.0, 2.5)),
)


def most_large_steps(large: float, small: float, speed_up: float) -> float:
    """K of ``STEPS`` at which all steps of the large model cost ``speed_up`` times as much as K of it and the rest."""
    return STEPS * (large / speed_up - small) / (large - small)


def layers_alone(stage_flops: Formula, tokens: int, text: int) -> float:
    return stage_flops(B=1, S=tokens, T=text)


def main() -> None:
    rows = []
    for file, (frames, height, width, text), formula, speed_ups in PAIRS:
        sampler = load_sampler_file(EXAMPLES / file)
        clip = VideoClip(0, frames, height, width, text, "")
        traced: dict[str, float] = {}
        for name in sampler.names():
            trace = trace_model(sampler.model_file(name), [clip])
            (stage,) = [stage for stage in trace.stages if stage.name == TRAINED]
            flops, tokens = stage.attrs["flops"], trace.tokens(clip)
            assert isinstance(flops, Formula)
            traced[name] = layers_alone(flops, tokens, text)
            print(f"{file} {name}: S {tokens}, {traced[name]:.1f} TFLOP traced, {formula[name]} by formula", flush=True)
        for kind, figures in (("traced", traced), ("by formula", formula)):
            large, small = figures["large"], figures["small"]
            steps = {speed_up: most_large_steps(large, small, speed_up) for speed_up in speed_ups}
            told = ", ".join(f"{speed_up:g}x at K = {k:.1f}" for speed_up, k in steps.items())
            print(f"  {kind}: at most {large / small:.2f}x, {told}", flush=True)
            rows.append({"file": file, "count": kind, **figures, "most": large / small, "steps": steps})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
