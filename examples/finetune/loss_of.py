"""The training loss of one step of a run, computed without the compiler: Diffusers' model, one clip after the other.

    python examples/finetune/loss_of.py BUILD STEP PIPELINE [--transformer FOLDER | --lora FOLDER]

Noise and timestep of a clip are drawn from (seed, step, clip). So a model with the weights that the run had before
STEP gives the loss that the run printed at STEP.
"""

import argparse
from pathlib import Path

import diffusers
import torch
import transformers
from diffusers import WanPipeline, WanTransformer3DModel

from arachnec.executable.folder import read_executable
from arachnec.models.batch import make_batch
from arachnec.models.diffusers.tokenizations import wan_prompt
from arachnec.models.encoders import TextEncoder, VideoEncoder


@torch.no_grad()
def loss_of(build: Path, step: int, pipeline: WanPipeline) -> float:
    """The mean over the clips of a build with one global batch."""
    executable = read_executable(build)
    model_file, seed = executable.model_file(), executable.training.seed
    text = TextEncoder(pipeline.tokenizer, pipeline.text_encoder.to(torch.bfloat16), tidy=wan_prompt)
    encoders = {"vae": VideoEncoder(pipeline.vae), "text": text}
    losses = []
    for clip in executable.clips:
        encoded = {name: encoder(encoder.load(clip, "cpu")) for name, encoder in encoders.items()}
        arguments, target = make_batch(model_file, [clip], seed, step, "cpu", encoded=encoded)
        losses.append(float(model_file.loss(pipeline.transformer(**arguments)[0], target)))
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("pipeline")
    parser.add_argument("--transformer", help="a folder for from_pretrained")
    parser.add_argument("--lora", help="a folder for load_lora_weights")
    given = parser.parse_args()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    pipeline = WanPipeline.from_pretrained(given.pipeline)
    if given.transformer:
        pipeline.transformer = WanTransformer3DModel.from_pretrained(given.transformer)
    if given.lora:
        pipeline.load_lora_weights(given.lora)
    print(f"{loss_of(given.build, given.step, pipeline):.6f}")


if __name__ == "__main__":
    main()
