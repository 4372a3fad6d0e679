"""A tiny pair of models, requests, and plans of them written by hand."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from arachnec.data.requests import Request
from arachnec.data.switch import Switch, parse_switch
from arachnec.executable.sampling_folder import Settings
from arachnec.generation.plan import Traced, forecast, traced
from arachnec.generation.rank import GenerationRank
from arachnec.generation.results import LATENTS, Outcome, Results
from arachnec.ir.nodes import Cascade, Level, Module, Stage
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.lowering.programs import lower
from arachnec.models.sampler_file import SamplerFile, load_sampler_file
from arachnec.passes.check import checked
from arachnec.planning.sampling.requests import sampling_module, segmented
from arachnec.sampling import loop as loops
from arachnec.sampling.forward import all_branches, branches_of
from arachnec.sampling.loop import Sampling, begin
from tests.distributed.executor_cases import BLOCK, TINY, cluster
from tests.distributed.harness import run_ranks
from tests.distributed.rank_device import rank_device

SAMPLER = (
    BLOCK
    + TINY
    + """

def models():
    return {"large": Tiny, "small": Tiny}


def models():
    return {"large": lambda: Tiny(), "small": lambda: Tiny()}


def scheduler():
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def tokens(request):
    return request.frames * (request.height // 8) * (request.width // 8)


def start(request, generator):
    return torch.randn(1, tokens(request), 4, generator=generator)


def arguments(name, latents, timestep, request, conditional):
    clip = request.clip(conditional)
    told = clip.encoded["text"] if "text" in clip.encoded else torch.full((1, 4), 0.1 * len(clip.caption or ""))
    return {"x": latents + told[:, None], "time": timestep.reshape(1) / 1000}
"""
).replace('    return {"large": Tiny, "small": Tiny}\n\n\ndef models():\n', "")
WAN_PAIR = """
from arachnec.models.diffusers.sampler import wan_sampler
from benchmarks.sampling.pipelines import wan_model

sampler = wan_sampler(large=wan_model(), small=wan_model(1), text_length=8)
models, scheduler, start, arguments = sampler.models, sampler.scheduler, sampler.start, sampler.arguments
"""
ENCODER = """

class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 4)

    def load(self, clip, device):
        return torch.full((1, 1), float(len(clip.caption or "")), device=device)

    def forward(self, loaded):
        return self.net(loaded)


def encoders():
    return {"text": Text()}
"""
DECODER = """

class Pixels(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, latents):
        return self.net(latents).tanh().transpose(1, 2).reshape(1, 3, -1, 2, 2)


def decoder():
    return Pixels()
"""
BROKEN_DECODER = DECODER.replace(".tanh()", ".tanh().mul(torch.nan if latents.shape[1] == 8 else 1)")
HALF = """

def start(request, generator):
    return torch.randn(1, tokens(request), 4, generator=generator).bfloat16()


def scheduler():
    from diffusers import SCHEDULER

    return SCHEDULER(OPTIONS)
"""
NOT_A_NUMBER = """

def start(request, generator):
    latents = torch.randn(1, tokens(request), 4, generator=generator)
    return latents * (float("nan") if request.id == "b" else 1.0)
"""
FIXED = parse_switch("fixed=3")
REQUESTS = (
    Request("a", "fox", 3, 16, 16, steps=6, guidance=3.0, seed=1, text_tokens=4),
    Request("b", "a cat", 2, 16, 16, steps=5, guidance=2.0, seed=2, text_tokens=6),
    Request("c", "dogs", 5, 16, 16, steps=6, seed=3, text_tokens=5),
)


@dataclass(frozen=True)
class Forced(Switch):
    """An adaptive rule whose outcome is known: K is ``outcome``."""

    outcome: int = 0

    def switches(self, distances: object, step: int, steps: int) -> bool:
        return step >= self.outcome


def written(folder: Path, more: str = "") -> SamplerFile:
    path = folder / "sampler.py"
    path.write_text(SAMPLER + more)
    return load_sampler_file(path)


def sampling_of(sampler: SamplerFile, switch: Switch, *names: str) -> Sampling:
    return Sampling(sampler, names or ("large", "small"), switch)


def traced_pair(sampling: Sampling, requests: tuple[Request, ...] = REQUESTS) -> Traced:
    """The tiny pair, traced once: a trace knows no rule, no predictors and no steps. ``requests`` have shapes of those
    above."""
    assert {request.shape for request in requests} <= {request.shape for request in REQUESTS}
    return replace(_traced_pair(), sampling=sampling, requests=requests)


@functools.cache
def _traced_pair() -> Traced:
    with tempfile.TemporaryDirectory() as folder:
        return traced(sampling_of(written(Path(folder)), FIXED), REQUESTS)


def tokens(request: Request) -> int:
    return request.frames * (request.height // 8) * (request.width // 8)


def partitioned(
    sampling: Sampling, requests: tuple[Request, ...], world: int, *, length: int = 2, batch: int = 1
) -> Module:
    """The requests as chains of segments, up to ``batch`` equal ones together."""
    small, per_token = Quantity(1e-3, "GiB"), Formula((Term(1e-6, (("B", 1), ("S", 1))),), "GiB")
    attrs = Attributes.of(params=3000, dtype="f32", hidden=12, heads=3, state=small, workspace=per_token)
    attrs = attrs.updated(output=per_token, forward=Formula((Term(0.1),), "ms"), costs="profile")
    stages = [Stage(name, False, attrs) for name in sampling.names]
    if sampling.sampler.encoders is not None:
        stages.insert(0, Stage("text", False, attrs.updated(hidden=None, heads=None, output=small)))
    two = len(sampling.names) == 2
    module = sampling_module(
        requests, tokens, stages, sampling.names, cluster(world),
        switch=str(sampling.switch) if two else None,
        forecasts=[forecast(sampling, request) for request in requests] if two else (),
        branches=sampling.sampler.branches,
    )  # fmt: skip
    return segmented(module, length=length, batch=batch)


def lowered(module: Module, works: Mapping[str, Mapping[str, object]]) -> Module:
    """The plan in which the k-th cascade runs at k ms. ``works`` say what is not on rank 0 alone, by cascade."""
    cascades = tuple(_placed(cascade, k, works.get(cascade.name, {})) for k, cascade in enumerate(module.cascades))
    makespan = Quantity(float(len(cascades)), "ms")
    attrs = module.attrs.updated(makespan=makespan, bound=Quantity(1.0, "ms"), proved=False)
    placed = replace(module, level=Level.PLACED, cascades=cascades, attrs=attrs)
    program = lower(placed)
    checked(program)
    return parse_module(print_module(program))


def _placed(cascade: Cascade, start: int, work: Mapping[str, object]) -> Cascade:
    given = {"ranks": (0,), **work}
    ranks = given["ranks"]
    assert isinstance(ranks, tuple)
    side = given.get("side", 1)
    assert isinstance(side, int)
    given = {"degree": len(ranks) // side, **given}
    assert isinstance(given["degree"], int)
    times = {"start": Quantity(float(start), "ms"), "end": Quantity(start + 1.0, "ms")}
    return replace(cascade, attrs=cascade.attrs.updated(**times, memory=Quantity(2e-3, "GiB"), **given))  # type: ignore[arg-type]


def expected(sampling: Sampling, request: Request) -> Tensor:
    """Its latents on one rank, without a program."""
    sampler = sampling.sampler
    models = {name: sampler.build(name).eval() for name in sampling.names}
    if sampler.encoders is not None:
        torch.manual_seed(0)
        encoder = sampler.encoders()["text"]
        with torch.no_grad():
            rows = [{"text": encoder(encoder.load(request.clip(c), "cpu"))} for c in (True, False)]  # type: ignore[operator]
        request = replace(request, encoded=rows[0], negative_encoded=rows[1])
    loop = begin(sampling, request)
    loops.run([loop], all_branches(sampler, branches_of(sampler, models.__getitem__, 1)))
    return loop.latents


def run(
    folder: Path,
    program: Module,
    switch: Switch,
    requests: tuple[Request, ...] = REQUESTS,
    *names: str,
    world: int = 1,
) -> dict[str, tuple[Outcome, Tensor | None]]:
    """The program on gloo ranks: what became of every request, by id. The first of ``world`` runs one of one rank."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    ranks = max(world, len(program.programs))
    told = run_ranks(ranks, _run, folder, print_module(program), switch, requests, names)
    outcomes = {outcome.id: outcome for rank in told for outcome in rank}
    files = {id: out / f"{id}.safetensors" for id in outcomes}
    return {id: (o, load_file(files[id])[LATENTS] if files[id].exists() else None) for id, o in outcomes.items()}


def _run(
    folder: Path, program: str, switch: Switch, requests: tuple[Request, ...], names: tuple[str, ...]
) -> list[Outcome]:
    import torch.distributed as dist

    module = parse_module(program)
    if dist.get_rank() >= len(module.programs):
        return []
    sampler = load_sampler_file(folder / "sampler.py")
    sampling = sampling_of(sampler, switch, *names)
    settings = Settings(str(folder / "sampler.py"), sampling.names, str(switch))
    outcomes: list[Outcome] = []
    results = Results(folder / "out", settings, sampler.digest)
    rank = GenerationRank(dist.get_rank(), sampling, module, requests, results, rank_device(), outcomes.append)
    rank.connect()
    rank.run()
    rank.groups.close()
    rank.connections.close()
    return outcomes
