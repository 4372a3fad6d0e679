"""Diffusers' VAEs and transformers' text encoders on ranks of a process group: one process imports them, and forks the
ranks."""

from __future__ import annotations

import os
import tempfile
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.harness import started_by
from tests.spmd import spatial_vaes, text_encoders

SIZES = ((5, 56, 40), (5, 72, 24))  # frames, height, width: latents of 7 x 5 and of 9 x 3
DEGREES = (3, 4)
TEXT_DEGREES = (1, 2, 3, 4)


def largest_differences(
    vaes: tuple[str, ...], texts: tuple[str, ...], timeout: float = 120.0
) -> dict[tuple[str, int], float]:
    """By encoder and degree: of what any rank has made of any clip, relative to the largest value of one rank's."""
    with started_by() as context:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, vaes, texts))
        process.start()
    theirs.close()
    try:
        answers = ours.recv() if ours.poll(timeout) else "no answer"
    finally:
        process.kill()
    assert not isinstance(answers, str), answers
    return {key: max(answer[key] for answer in answers if key in answer) for key in answers[0]}


def _serve(pipe: Connection, vaes: tuple[str, ...], texts: tuple[str, ...]) -> None:
    from arachnec.models.encoders import VideoEncoder

    torch.set_num_threads(1)
    context = get_context("fork")
    torch.manual_seed(0)
    encoders = {name: VideoEncoder(spatial_vaes.spread(getattr(spatial_vaes, name)())) for name in vaes}
    captioned = {name: (text_encoders.encoder(name), _cuts(name)) for name in texts}
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(max(DEGREES))]
        ranks = [
            context.Process(target=_rank, args=(i, folder, encoders, captioned, end)) for i, (_, end) in enumerate(ends)
        ]
        for rank, (_, end) in zip(ranks, ends, strict=True):
            rank.start()
            end.close()
        answers: list[Any] = []
        for reading, _ in ends:
            answers.append(reading.recv() if reading.poll(100) else "a rank did not answer")
        for rank in ranks:
            rank.join(5)
            rank.kill()
    failed = [answer for answer in answers if isinstance(answer, str)]
    pipe.send("\n".join(failed) if failed else answers)


def _cuts(name: str) -> Any:
    from arachnec.spmd.tensor_parallel.division import cuts_of

    with torch.device("meta"):
        return cuts_of(text_encoders.encoder(name), torch.empty((1, 2, text_encoders.TOKENS), dtype=torch.int64))


def _rank(
    rank: int, folder: str, encoders: dict[str, Any], captioned: dict[str, tuple[Any, Any]], pipe: Connection
) -> None:
    from arachnec.spmd.spatial.division import encode_divided
    from arachnec.spmd.spatial.peers import Group
    from arachnec.spmd.tensor_parallel.division import encode_with_parts

    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=max(DEGREES))
        groups = {degree: dist.new_group(list(range(degree))) for degree in {*DEGREES, *TEXT_DEGREES}}
        apart: dict[tuple[str, int], float] = {}
        for name, encoder in encoders.items():
            for size in SIZES:
                loaded = torch.arange(3 * size[0] * size[1] * size[2]).mul(37).remainder(251).to(torch.uint8)
                loaded = loaded.view(1, 3, *size)
                alone = encoder(loaded)
                for degree in (d for d in DEGREES if rank < d):
                    ranks = tuple(range(degree))
                    shared = encode_divided(encoder, loaded, Group(ranks, rank, groups[degree]), degree)
                    difference = float((shared - alone).abs().max() / alone.abs().max())
                    apart[name, degree] = max(apart.get((name, degree), 0.0), difference)
        for name, (encoder, cuts) in captioned.items():
            loaded = text_encoders.captions()
            alone, weights = encoder(loaded), dict(encoder.named_parameters())
            for degree in (d for d in TEXT_DEGREES if rank < d):
                peers = Group(tuple(range(degree)), rank, groups[degree])
                shared = encode_with_parts(encoder, cuts.parts(weights, degree, rank), loaded, peers, degree)
                apart[name, degree] = float((shared - alone).abs().max() / alone.abs().max())
        pipe.send(apart)
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)
