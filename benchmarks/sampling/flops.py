"""What a step costs: FLOPs of one forward as traced, of the pairs that SRDiffusion (arXiv 2505.19151) samples with.

    python -m benchmarks.sampling.flops [FILE.json]

Beside them stands the formula of ``pairs_of_models``: (8 + 4 ffn/h) S h^2 + 4 S^2 h a layer, no text, no shell. The
trace counts both: of Wan's T text tokens a layer's cross-attention alone takes 4 S h^2 + 4 T h^2 + 4 S T h, which is
153.3 and 12.5 TFLOP of its two models; 1525.0 + 153.3 and 270.5 + 12.5 are what is traced. K is how many of 50 steps
the large model may take for a speed-up that FLOPs alone would allow.
"""

import json
import sys
from pathlib import Path

from arachnec.data.clip import VideoClip
from arachnec.ir.values import Formula
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.trace import TRAINED, trace_model
from benchmarks.sampling.pairs_of_models import COGVIDEOX, WAN

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 50
CROSS_ATTENTION = ("sample_wan2_1.py",)  # the others have the text in their sequence
# file, clip, the pair's sizes, speed-ups to ask K for
PAIRS = (
    ("sample_wan2_1.py", (81, 480, 832, 512), WAN, (2.0, 3.0, 4.0)),
    ("sample_cogvideox.py", (49, 480, 720, 226), COGVIDEOX, (1.5, 2.0, 2.5)),
)


def most_large_steps(large: float, small: float, speed_up: float) -> float:
    """K of ``STEPS`` at which all steps of the large model cost ``speed_up`` times as much as K of it and the rest."""
    return STEPS * (large / speed_up - small) / (large - small)


def layers_alone(stage_flops: Formula, tokens: int, text: int) -> float:
    return stage_flops(B=1, S=tokens, T=text)


def cross_attention(tokens: int, text: int, width: int, layers: int) -> float:
    """TFLOP of a forward: queries and outputs of every token, keys and values of the text, and their products."""
    return layers * 4 * (tokens * width**2 + text * width**2 + tokens * text * width) / 1e12


def main() -> None:
    rows = []
    for file, (frames, height, width, text), pair, speed_ups in PAIRS:
        transformers = {"large": pair.large, "small": pair.small}
        formula = {name: transformer.tflop(pair.tokens) for name, transformer in transformers.items()}
        sampler = load_sampler_file(EXAMPLES / file)
        clip = VideoClip(0, frames, height, width, text, "")
        traced: dict[str, float] = {}
        for name in sampler.names():
            trace = trace_model(sampler.model_file(name), [clip])
            (stage,) = [stage for stage in trace.stages if stage.name == TRAINED]
            flops, tokens = stage.attrs["flops"], trace.tokens(clip)
            assert isinstance(flops, Formula)
            traced[name] = layers_alone(flops, tokens, text)
            print(
                f"{file} {name}: S {tokens}, {traced[name]:.1f} TFLOP traced, {formula[name]:.1f} by formula",
                flush=True,
            )
        kinds = {"traced": traced, "by formula": formula}
        if file in CROSS_ATTENTION:
            kinds["by formula, with the text"] = {
                name: formula[name] + cross_attention(pair.tokens, text, own.hidden, own.layers)
                for name, own in transformers.items()
            }
        for kind, figures in kinds.items():
            large, small = figures["large"], figures["small"]
            steps = {speed_up: most_large_steps(large, small, speed_up) for speed_up in speed_ups}
            told = ", ".join(f"{speed_up:g}x at K = {k:.1f}" for speed_up, k in steps.items())
            sizes = f"{large:.1f} and {small:.1f} TFLOP, "
            print(f"  {kind}: {sizes}at most {large / small:.2f}x, {told}", flush=True)
            rows.append({"file": file, "count": kind, **figures, "most": large / small, "steps": steps})
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
