"""A loop of your own: your model, optimizer, schedule, dataset and logging; the engine plans and runs every step.

python examples/own_loop.py [CHECKPOINTS]    one process; on more: torchrun --nproc-per-node=2 examples/own_loop.py
"""

import sys

import torch
from plain_dit import CHANNELS, VideoDiT, loss
from torch.utils.data import DataLoader, Dataset

import arachnec

SIZES = ((9, 64, 96), (1, 64, 64), (5, 32, 64), (1, 64, 64), (9, 64, 96), (5, 32, 64))  # frames, height, width


def shape_of(frames, height, width):
    return 1, CHANNELS, (frames + 3) // 4, height // 8, width // 8


class Latents(Dataset):
    """A map-style dataset: the size of each clip, and what was computed of it; here random numbers."""

    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        frames, height, width = SIZES[index]
        latents = torch.randn(shape_of(*SIZES[index]), generator=torch.Generator().manual_seed(index))
        return {"id": index, "frames": frames, "height": height, "width": width, "caption": "a cat", "latents": latents}


def sample(clip, generator):
    shape = shape_of(clip.frames, clip.height, clip.width)
    clean = clip.values["latents"] if clip.values else torch.zeros(shape)  # without values only shapes matter
    noise, t = torch.randn(shape, generator=generator), torch.rand(1, generator=generator)
    caption = torch.tensor([[*(clip.caption or "").encode(), 256]])
    return {"latents": (1 - t) * clean + t * noise, "caption": caption, "t": t}, noise - clean


def train(checkpoint=None, steps=4):
    torch.manual_seed(0)
    engine = arachnec.Engine(
        VideoDiT(width=48, heads=4, layers=2),
        DataLoader(Latents(), batch_size=3, collate_fn=list),
        sample=sample, loss=loss, steps=steps, clip_norm=0.0, checkpoint=checkpoint, resume=checkpoint is not None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )  # fmt: skip
    for step in engine:
        if torch.distributed.get_rank() == 0:
            print(f"step {step.number}: loss {step.loss:.6f}, {step.metrics['tokens_per_s']:.0f} tokens/s", flush=True)
    return engine


if __name__ == "__main__":
    train(*sys.argv[1:])
