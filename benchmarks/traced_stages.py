"""What the models of the planning benchmarks cost, traced once and kept as IR, and the clips they are planned for.

    python benchmarks/traced_stages.py [NAME ...]        # traces again; minutes a model

`benchmarks/data/NAME.cascade` holds the stages alone: FLOPs, memory and traffic as formulas. Graphs and clips are left
out. The benchmarks put any clips and any cluster beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Clip, Level, Module
from arachnec.ir.parser import parse_file
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes

HERE = Path(__file__).parent
MODELS = {
    "cogvideox_5b": HERE.parent / "examples" / "cogvideox_5b.py",
    "hunyuanvideo": HERE.parent / "examples" / "hunyuanvideo.py",
    "wan2_1_14b": HERE.parent / "examples" / "wan2_1_14b.py",
    "wan2_1_14b_lora": HERE.parent / "examples" / "wan2_1_14b_lora.py",
    "wan2_1_1_3b_vae": HERE / "models" / "wan2_1_1_3b_vae.py",
}
TRACED_WITH = ((1, 480, 832), (17, 480, 832), (49, 480, 832), (81, 720, 1280))
FRAMES = (17, 33, 49, 65, 81, 97, 121)
IMAGES = ((512, 512), (480, 832), (720, 1280))
TEXT = 256


def module_of(model: str, clips: tuple[Clip, ...], cluster: str) -> Module:
    """A traced module of a model's stages, these clips and this cluster."""
    path = HERE / "data" / f"{model}.cascade"
    stages = parse_file(path).stages
    return Module(model, Level.TRACED, parse_cluster(cluster), clips, stages)


def clip(number: int, frames: int, height: int, width: int) -> Clip:
    """Tokens as for a VAE of stride 4, 8, 8 and patches of 1, 2, 2."""
    tokens = ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)
    return Clip(number, frames, height, width, TEXT, tokens, Attributes.of(iteration=0))


def video_mix(count: int, seed: int) -> tuple[Clip, ...]:
    """The bucketed video mix of `plan_video_mix.py` with its shapes: 35 % images, 25 % 256p, 30 % 480p, 10 % 720p."""
    rng = random.Random(seed)
    stages = []
    for number in range(count):
        u = rng.random()
        if u < 0.35:
            stages.append(clip(number, 1, *rng.choice(IMAGES)))
        else:
            size = (256, 400) if u < 0.60 else (480, 832) if u < 0.90 else (720, 1280)
            stages.append(clip(number, rng.choice(FRAMES), *size))
    return tuple(stages)


def retrace(name: str) -> str:
    """The IR of a model's stages."""
    from arachnec.driver import trace

    with tempfile.TemporaryDirectory() as scratch:
        video = Path(scratch) / "none.mp4"  # tracing opens no video
        video.touch()
        manifest = Path(scratch) / "clips.jsonl"
        keys = ("frames", "height", "width")
        rows = [
            dict(zip(keys, shape, strict=True)) | {"text_tokens": text, "path": str(video)}
            for shape in TRACED_WITH
            for text in (64, TEXT)
        ]
        manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        module = trace(MODELS[name], manifest, "1:h100-80g", batch="all")
    # blocks name graphs, which are left out; their number stays, for the launches they cost
    return print_module(replace(module, name=name, clips=(), graphs=(), cluster=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    for name in parser.parse_args().names:
        (HERE / "data" / f"{name}.cascade").write_text(retrace(name), encoding="utf-8")
        print(f"traced {name}", flush=True)


if __name__ == "__main__":
    main()
