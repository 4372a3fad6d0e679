"""The same latents for any plan, degree, batch, order and other requests, and for every outcome of a switch through one
program.

At both ends of the switch, on one rank, they are those of one model alone to the bit: a difference of 0.

    python -m benchmarks.sampling.invariance [FILE.json]

A tiny pair of linear models and a tiny pair of Wan's, fp32, 50 steps, on gloo ranks of one machine; plans by hand
and the planner's. The reference is each request alone on one rank.
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from arachnec.data.requests import Request
from arachnec.data.switch import Switch, parse_switch
from arachnec.executable.sampling_folder import Settings
from arachnec.generation.plan import planned, traced
from arachnec.generation.rank import GenerationRank
from arachnec.generation.results import LATENTS, Outcome, Results
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.models.sampler_file import load_sampler_file
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import cluster
from tests.distributed.harness import run_ranks
from tests.generation.cases import WAN_PAIR, Forced, expected, lowered, partitioned, run, sampling_of, written

STEPS, WORLD = 50, 4
LONGEST_S = 3600.0  # for all outcomes of a switch
REQUESTS = (
    Request("a", "fox", 3, 16, 16, steps=STEPS, guidance=3.0, seed=1, text_tokens=4),
    Request("b", "a cat", 2, 16, 16, steps=STEPS, guidance=2.0, seed=2, text_tokens=6),
    Request("c", "dogs", 5, 16, 16, steps=STEPS, seed=3, text_tokens=5),
)
EVERY = [f"r{n}.{s}" for n in range(3) for s in range(2)]
GUIDED = [f"r{n}.{s}" for n in range(2) for s in range(2)]
PLANS: dict[str, Mapping[str, Mapping[str, object]]] = {
    "one rank": {},
    "a rank each": {f"r{n}.{s}": {"ranks": (n,)} for n in range(3) for s in range(2)},
    "a rank for each model": {f"r{n}.1": {"ranks": (1,)} for n in range(3)},
    "degree 2 (ulysses)": {name: {"ranks": (0, 1)} for name in EVERY},
    "degree 3 (ring)": {name: {"ranks": (0, 1, 2), "ring": 3} for name in EVERY},
    "degree 4 (ulysses, 3 heads)": {name: {"ranks": (3, 1, 0, 2)} for name in EVERY},
    "degree 4 (ulysses 2 x ring 2)": {name: {"ranks": (0, 1, 2, 3), "ulysses": 2, "ring": 2} for name in EVERY},
    "branches apart": {name: {"ranks": (0, 1), "side": 2} for name in GUIDED},
    "branches apart, degree 2 each": {name: {"ranks": (0, 1, 2, 3), "side": 2} for name in GUIDED},
}

BATCHES: dict[str, dict[str, object]] = {
    "one rank": {},
    "shared by 2": {"ranks": (0, 1)},
    "shared by 3 (ring)": {"ranks": (2, 0, 1), "ring": 3},
    "branches apart, degree 2 each": {"ranks": (0, 1, 2, 3), "side": 2},
}
POLICIES = ("search", "replica", "one-degree", "two-pools")


def difference(latents: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest, relative to the largest number of the reference."""
    return float((latents - reference).abs().max() / reference.abs().max())


def at_outcomes(
    folder: Path, program: Module, switch: Switch, outcomes: Sequence[int], requests: tuple[Request, ...]
) -> dict[tuple[int, str], torch.Tensor]:
    """The latents of every request for each of these K, by K and id. The ranks build and capture their models once."""
    (folder / "out").mkdir(exist_ok=True)
    text, ranks = print_module(program), len(program.programs)
    told = run_ranks(ranks, _at_outcomes, folder, text, switch, outcomes, requests, timeout=LONGEST_S)
    latents: dict[tuple[int, str], torch.Tensor] = {}
    for rank in told:
        for outcome, id, steps, produced in rank:
            assert steps == STEPS
            latents[outcome, id] = torch.tensor(produced)
    assert latents.keys() == {(outcome, str(request.id)) for outcome in outcomes for request in requests}
    return latents


def _at_outcomes(
    folder: Path, program: str, switch: Switch, outcomes: Sequence[int], requests: tuple[Request, ...]
) -> list[tuple[int, str, int, list[object]]]:
    sampler, module, models = load_sampler_file(folder / "sampler.py"), parse_module(program), None
    settings = Settings(str(folder / "sampler.py"), ("large", "small"), str(switch))
    told: list[tuple[int, str, int, list[object]]] = []
    by_id = {str(request.id): request for request in requests}
    for outcome in outcomes:
        sampling = sampling_of(sampler, Forced(switch.kind, switch.value, switch.least, switch.most, outcome))
        results = Results(folder / "out", settings, sampler.digest)
        ended: list[Outcome] = []
        rank = GenerationRank(dist.get_rank(), sampling, module, requests, results, torch.device("cpu"), ended.append)
        rank.models = models = models or rank.models
        rank.connect()
        rank.run()
        rank.groups.close()
        rank.connections.close()
        for end in ended:
            told.append((outcome, end.id, end.steps, load_file(results.latents(by_id[end.id]))[LATENTS].tolist()))
    return told


def of_linear_pair(folder: Path) -> Iterator[tuple[str, float]]:
    """Plans by hand and the planner's; a batch; other orders."""
    rule = parse_switch("fixed=17")
    sampling = sampling_of(written(folder), rule)
    alike = tuple(replace(REQUESTS[0], id=id, seed=seed) for seed, id in enumerate("xyz"))
    references = {str(request.id): expected(sampling, request) for request in (*REQUESTS, *alike)}

    def worst(program: Module, requests: tuple[Request, ...]) -> float:
        results = run(folder, program, rule, requests)
        return max(_difference_of(results[str(request.id)][1], references[str(request.id)]) for request in requests)

    for plan, works in PLANS.items():
        yield plan, worst(lowered(partitioned(sampling, REQUESTS, WORLD), works), REQUESTS)
    for plan, work in BATCHES.items():
        module = partitioned(sampling, alike, WORLD, batch=3)
        yield f"a batch of 3, {plan}", worst(lowered(module, {"r0.0": work, "r0.1": work}), alike)
    for order in ((2, 0, 1), (1, 2, 0)):
        requests = tuple(REQUESTS[number] for number in order)
        program = _by_planner(partitioned(sampling, requests, WORLD), "search")
        yield f"requests {', '.join(str(r.id) for r in requests)}, the planner's", worst(program, requests)
    for policy in POLICIES:
        program = _by_planner(partitioned(sampling, (*REQUESTS, *alike), WORLD), policy)
        yield f"six requests, the planner's {policy}", worst(program, (*REQUESTS, *alike))


def of_wan_pair(folder: Path) -> Iterator[tuple[str, float]]:
    """The planner's plans of four requests, of which three of unlike captions are one batch."""
    path, rule = folder / "sampler.py", parse_switch("fixed=17")
    path.write_text(WAN_PAIR)
    sampling = sampling_of(load_sampler_file(path), rule)
    alike = Request("", None, 9, 32, 48, steps=STEPS, guidance=3.0)
    captions = {"fox": 4, "a cat": 6, "owl": 3}
    requests = (
        *(
            replace(alike, id=f"w{seed}", caption=caption, text_tokens=text, seed=seed)
            for seed, (caption, text) in enumerate(captions.items())
        ),
        Request("other", "dogs", 5, 32, 64, steps=STEPS, seed=9, text_tokens=5),
    )
    references = {str(request.id): expected(sampling, request) for request in requests}
    own = traced(sampling, requests)
    for world, batch, policy in (
        (1, 3, "replica"),
        (2, 3, "search"),
        (2, 3, "one-degree"),
        *((4, 1, p) for p in POLICIES),
    ):
        passes = f"segment{{batch={batch}}},annotate,schedule-sampling{{policy={policy},steps=20}},place,lower,check"
        program = planned(own.module(cluster(world)), Pipeline.parse(passes))
        results = run(folder, program, rule, requests)
        together = max(cascade.batch for cascade in program.cascades)
        assert together == batch
        worst = max(_difference_of(results[id][1], reference) for id, reference in references.items())
        yield f"Wan's on {counted(world, 'rank')}, batches of {batch}, the planner's {policy}", worst


def of_every_outcome(folder: Path) -> Iterator[tuple[str, float]]:
    """Every K through one program: of one request by hand, of three by the planner; the ends are one model alone."""
    adaptive = Switch("adaptive", 0.1, least=0, most=STEPS)
    sampler, one = written(folder), REQUESTS[:1]
    sampling, ranks = sampling_of(sampler, adaptive), ((0,), (1,), (0, 1))
    module = partitioned(sampling, one, 2, length=10)
    by_hand = lowered(module, {c.name: {"ranks": ranks[n % 3]} for n, c in enumerate(module.cascades)})
    three = _by_planner(partitioned(sampling, REQUESTS, 2, length=10), "search")
    references = {
        (outcome, str(request.id)): expected(sampling_of(sampler, parse_switch(f"fixed={outcome}")), request)
        for outcome in range(STEPS + 1)
        for request in REQUESTS
    }
    for what, program, requests in (("one program", by_hand, one), ("the planner's, three requests", three, REQUESTS)):
        latents = at_outcomes(folder, program, adaptive, range(STEPS + 1), requests)
        worst = max(difference(produced, references[key]) for key, produced in latents.items())
        yield f"every K from 0 to {STEPS} through {what}", worst
    program = lowered(partitioned(sampling, one, 1, length=10), {})
    ends = at_outcomes(folder, program, adaptive, (0, STEPS), one)
    for outcome, name in ((0, "small"), (STEPS, "large")):
        alone = parse_switch("fixed=0")  # branches batched as above: one by one they are equal to rounding only
        of_one = lowered(partitioned(sampling_of(sampler, alone, name), one, 1, length=10), {})
        latents_alone = run(folder, of_one, alone, one, name)["a"][1]
        yield f"K = {outcome} is {name} alone", _difference_of(latents_alone, ends[outcome, "a"])


def _by_planner(module: Module, policy: str) -> Module:
    """A plan of a segmented module whose stages have costs."""
    passes = f"schedule-sampling{{policy={policy},steps=20}},place,lower,check"
    return Pipeline.parse(passes).run(replace(module, level=Level.COSTED))


def _difference_of(latents: torch.Tensor | None, reference: torch.Tensor) -> float:
    assert latents is not None
    return difference(latents, reference)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for part in (of_linear_pair, of_wan_pair, of_every_outcome):
        with tempfile.TemporaryDirectory() as name:
            for what, worst in part(Path(name)):
                rows.append({"what": what, "relative_difference": worst})
                print(f"{what:70} {worst:.1e}", flush=True)
                if len(sys.argv) > 1:
                    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
