"""What a model's stages and this machine's links take, measured on as many ranks at once as training will use.

All ranks run the same cascade at the same time, so that what they cost each other, cores and memory bandwidth, is in
the numbers. One rank: ``python -m arachnec.backends.profiler MODEL DATA DEVICE OUTPUT``, from ``arachnec profile``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import (
    build_encoders,
    build_model,
    cascade_loss,
    drop_gradients,
    encode,
    trained_parameters,
)
from arachnec.backends.local_profile import Measured
from arachnec.backends.torch_distributed.agreement import gather, share_text
from arachnec.backends.torch_distributed.ranks import as_rank, exit_with, local_device
from arachnec.backends.training import Training
from arachnec.data.clip import VideoClip
from arachnec.data.manifest import read_manifest
from arachnec.models.file import ModelFile, load_model_file
from arachnec.passes.profile_file import LinkProfile, Measurement

SHAPES = 6  # clip shapes measured, from the shortest to the longest
BATCH = 3  # of the shortest shape, once more, to tell the cost of a clip from that of a call
REPEATS = (3, 12)
BUDGET_S = 1.0  # for one shape; REPEATS[0] are always done
MESSAGES = (4 << 10, 4 << 20)  # bytes


@dataclass(frozen=True)
class Point:
    """A micro-batch to measure."""

    clips: tuple[VideoClip, ...]
    tokens: int


def choose_points(clips: Sequence[VideoClip], tokens: Sequence[int]) -> list[Point]:
    """Clips of up to ``SHAPES`` shapes spread over the range of tokens, and a batch of the shortest."""
    of_shape = {clip.shape: Point((clip,), count) for clip, count in zip(clips, tokens, strict=True)}
    ordered = sorted(of_shape.values(), key=lambda point: (point.tokens, point.clips[0].text_tokens))
    last = len(ordered) - 1
    chosen = sorted({round(i * last / max(1, SHAPES - 1)) for i in range(SHAPES)})
    points = [ordered[i] for i in chosen]
    short = points[0]
    return [Point(short.clips * BATCH, short.tokens), *points]


def measure(model_file: ModelFile, clips: Sequence[VideoClip], tokens: Sequence[int], device: torch.device) -> Measured:
    """Time every stage at degree 1 and the links, on all ranks of the default group at once."""
    training = Training()
    points = choose_points(clips, tokens)
    found: list[tuple[str, str, list[Measurement]]] = []
    encoders = build_encoders(model_file, training, device)
    for name, encoder in encoders.items():
        times = [_slowest(partial(_timed_encode, encoder, point, device), device) for point in points]
        found.append((name, "forward", [_measurement(p, t[0]) for p, t in zip(points, times, strict=True)]))
    model = build_model(model_file, training, device)
    parameters = trained_parameters(model)
    forward, backward = [], []
    for point in points:
        first = point.clips[0]
        encoded = {name: encode(e, [first], device) for name, e in encoders.items()}
        values = {name: torch.cat([value] * len(point.clips)) for name, value in encoded.items()}
        run = partial(_timed_training, model, model_file, point, values, training, device)
        ahead, back = _slowest(run, device)
        drop_gradients(parameters)
        forward.append(_measurement(point, ahead))
        backward.append(_measurement(point, back))
    found += [(TRAINED, "forward", forward), (TRAINED, "backward", backward)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Measured(name, found, measure_links(device))


def measure_links(device: torch.device) -> LinkProfile | None:
    """Latency and bandwidth of a message while every rank sends one to the next: time = latency + bytes / bandwidth."""
    if dist.get_world_size() < 2:
        return None
    times = []
    for size in MESSAGES:
        outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
        incoming = torch.empty_like(outgoing)
        run = partial(_timed_exchange, outgoing, incoming, device)
        times.append(_slowest(run, device)[0])
    return fit_links(MESSAGES, times)


def fit_links(sizes: Sequence[int], times: Sequence[float]) -> LinkProfile:
    """Latency from the smallest message, bandwidth from the largest less the latency. Sizes in bytes, times in ms."""
    latency = min(times)
    beyond = max(times[-1] - latency, 1e-6)
    return LinkProfile(latency=latency * 1e3, intra=(sizes[-1] - sizes[0]) / beyond / 1e6)


TRAINED = "dit"


def _timed_encode(encoder: nn.Module, point: Point, device: torch.device) -> tuple[float, ...]:
    started = _now(device)
    encode(encoder, point.clips, device)
    return ((_now(device) - started) * 1e3,)


def _timed_exchange(outgoing: Tensor, incoming: Tensor, device: torch.device) -> tuple[float, ...]:
    """Send to the next rank of the circle and receive from the one before."""
    world, rank = dist.get_world_size(), dist.get_rank()
    started = _now(device)
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % world),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return ((_now(device) - started) * 1e3,)


def _timed_training(
    model: nn.Module,
    model_file: ModelFile,
    point: Point,
    encoded: dict[str, Tensor],
    training: Training,
    device: torch.device,
) -> tuple[float, ...]:
    started = _now(device)
    loss = cascade_loss(model, model_file, point.clips, encoded, training, 0, device)
    middle = _now(device)
    loss.backward()  # type: ignore[no-untyped-call]
    return ((middle - started) * 1e3, (_now(device) - middle) * 1e3)


def _slowest(run: Callable[[], tuple[float, ...]], device: torch.device) -> tuple[float, ...]:
    """The median over repeated runs of each of its times, averaged over the ranks, which all run at once.

    The first run, which warms up, decides how many follow, on all ranks the same number.
    """
    dist.barrier()
    started = time.perf_counter()
    run()
    once = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    longest = max(float(value) for value in gather(once, device))
    repeats = min(REPEATS[1], max(REPEATS[0], int(BUDGET_S / max(longest, 1e-6))))
    rows = []
    for _ in range(repeats):
        dist.barrier()
        rows.append(run())
    medians = torch.tensor([statistics.median(column) for column in zip(*rows, strict=True)], dtype=torch.float64)
    return tuple(torch.stack(gather(medians, device)).mean(0).tolist())


def _measurement(point: Point, ms: float) -> Measurement:
    return Measurement(len(point.clips), point.tokens, point.clips[0].text_tokens, 1, ms)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tokens(model_file: ModelFile, clips: Sequence[VideoClip], device: torch.device) -> list[int]:
    """S of every clip; traced on rank 0, since the ranks share the machine's cores."""
    text = None
    if dist.get_rank() == 0:
        from arachnec.passes.trace import trace_model

        traced = trace_model(model_file, clips)
        text = msgspec.json.encode([traced.tokens(clip) for clip in clips]).decode()
    return msgspec.json.decode(share_text(text, device), type=list[int])


def main(model: str, data: str, planned_device: str, output: str) -> None:
    def work(device: torch.device) -> None:
        model_file = load_model_file(model)
        clips = read_manifest(data).clips
        measured = measure(model_file, clips, _tokens(model_file, clips, device), device)
        if dist.get_rank() == 0:
            Path(output).write_bytes(msgspec.json.encode(measured))

    as_rank(work, local_device(cpu=planned_device == "cpu"))


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
