"""Latents of ``arachnec generate`` on the device, against Diffusers' own pipelines there; and a switch that adapts.

In fp32 without TF32. On a processor the largest difference of these cases is below 1e-5: six steps feed each other, and
a batch of two branches sums in another order than one. Kernels of a device choose their order by the launch's size,
hence ten times that. The adaptive switch has no pipeline to be held against: its reference is our own plain loop on the
processor, with the same K, and ten times the limit again for kernels of two kinds of device.

The models of a family have one structure here, and the requests one size: each family is traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import msgspec
from acceptance.machine import Machine, Row, verdict
from acceptance.runs import jsonl, only_rank
from safetensors.torch import load_file
from torch import Tensor

from arachnec.data.requests import Request
from arachnec.data.switch import ONE_MODEL, Switch, parse_switch
from arachnec.generation import plan
from arachnec.generation.plan import asked
from arachnec.generation.rank import GenerationRank
from arachnec.generation.results import Outcome
from arachnec.generation.run import Generation, prepare, run_here
from arachnec.passes.trace import Trace, trace_model
from arachnec.sampling.forward import all_branches, branches_of
from arachnec.sampling.loop import Sampling, run
from benchmarks.sampling import pipelines

LIMIT, ACROSS = 1e-4, 1e-3
CASE_S = 20.0  # left, for another case to be begun
CASES = (
    pipelines.Case("wan", "unipc", 5.0, boundary=0.875),
    pipelines.Case("hunyuan_video", "euler", 5.0),
    pipelines.Case("cogvideox", "cogvideox-dpm", 5.0),  # draws noise in every step
    pipelines.Case("wan", "euler", 1.0),
)
ADAPTS = pipelines.Case("wan", "unipc", 5.0, boundary=0.5)  # two models
FILE = """
import functools
import torch
from benchmarks.sampling import pipelines

file = pipelines.sampler_file(pipelines.video_sampler(pipelines.{case}))
scheduler, start, arguments, guidance = file.scheduler, file.start, file.arguments, file.guidance


def built(name):
    return file.build(name) if torch.empty(0).is_meta else pipelines.build(file)[name]


def models():
    return {{name: functools.partial(built, name) for name in file.names()}}
"""


def rows(machine: Machine) -> Iterator[Row]:
    yield adaptive(machine)
    for number, case in enumerate(CASES[:1] if machine.dry else CASES):
        if machine.left > CASE_S:
            yield beside_diffusers(machine, f"case{number}", case)


def beside_diffusers(machine: Machine, name: str, case: pipelines.Case) -> Row:
    switch = ONE_MODEL if case.boundary is None else Switch("boundary", case.boundary)
    latents, outcome = generated(machine, name, case, case.request, switch)
    file = pipelines.sampler_file(pipelines.video_sampler(case))
    models = {key: model.to(machine.device) for key, model in pipelines.build(file).items()}
    expected = pipelines.theirs(case, models, file, machine.device)
    row = {"case": str(case), "device": str(machine.device), "K": outcome["switched"], "seconds": outcome["seconds"]}
    return verdict({**row, "error": apart(latents, expected)}, "error", LIMIT)


def adaptive(machine: Machine) -> Row:
    """K is 5: the curve is at 0.226 behind step 4 and at 0.210 behind step 5, so that rounding does not decide."""
    switch, request = parse_switch("adaptive=0.218,least=4,most=9"), replace(ADAPTS.request, steps=10)
    latents, outcome = generated(machine, "adaptive", ADAPTS, request, switch, by_command=True)
    file = pipelines.sampler_file(pipelines.video_sampler(ADAPTS))
    models = pipelines.build(file)
    state = pipelines.loop(file, models, request, switch)
    run([state], all_branches(file, branches_of(file, models.__getitem__)))
    row = {"case": f"{ADAPTS.family}, {switch}", "device": str(machine.device), "K": outcome["switched"]}
    row |= {"expected_K": state.switched, "curve": outcome["distances"], "error": apart(latents, state.latents)}
    judged = verdict(row, "error", ACROSS)
    return {**judged, "right": judged["right"] and row["K"] == row["expected_K"]}


def generated(
    machine: Machine, name: str, case: pipelines.Case, request: Request, switch: Switch, *, by_command: bool = False
) -> tuple[Tensor, Row]:
    """The latents of the request, and what became of it; ``by_command``: from a rank of its own."""
    sampler = machine.scratch / f"{name}.py"
    sampler.write_text(FILE.format(case=repr(case)))
    data, folder = jsonl(machine.scratch / f"{name}.jsonl", [row_of(request)]), machine.scratch / name
    rule = None if switch == ONE_MODEL else str(switch)
    with mock.patch.object(plan, "trace_model", functools.partial(traced_once, case.family)):
        generation = prepare(sampler, data, machine.cluster(1), folder, switch=rule)
    if by_command:
        outcome = run_here(generation)["requests"][0]
    else:
        outcome = in_this_process(machine, generation, asked(sampler, rule, None, "carry")[0])
    return load_file(folder / f"{request.id}.safetensors")["latents"], outcome


_TRACED: dict[str, Trace] = {}


def traced_once(family: str, *arguments: Any, **options: Any) -> Trace:
    if family not in _TRACED:
        _TRACED[family] = trace_model(*arguments, **options)
    return _TRACED[family]


def in_this_process(machine: Machine, generation: Generation, sampling: Sampling) -> Row:
    """What ``generation.worker`` does, as the one rank."""
    assert generation.program is not None
    generation.results.folder.mkdir(exist_ok=True)
    told: list[Outcome] = []
    device = only_rank(machine)
    rank = GenerationRank(0, sampling, generation.program, generation.requests, generation.results, device, told.append)
    rank.connect()
    rank.run()
    return msgspec.to_builtins(told[0])


def row_of(request: Request) -> dict[str, Any]:
    """What a file of requests says of it."""
    return {key: value for key, value in asdict(request).items() if value != getattr(Request("", "", 1, 1, 1), key)}


def apart(latents: Tensor, expected: Tensor) -> float:
    expected = expected.cpu()
    return float((latents - expected).abs().max() / expected.abs().max())
