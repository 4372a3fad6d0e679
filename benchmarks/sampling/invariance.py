"""The same latents for any plan, degree and other requests, and for every outcome of a switch through one program.

At both ends of the switch, on one rank, they are those of one model alone to the bit: a difference of 0.

    python -m benchmarks.sampling.invariance [FILE.json]

A tiny pair of models, fp32, 50 steps, on gloo ranks of one machine. The reference is each request alone on one rank.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from arachnec.data.requests import Request
from arachnec.data.switch import Switch, parse_switch
from arachnec.executable.sampling_folder import Settings
from arachnec.generation.rank import GenerationRank
from arachnec.generation.results import LATENTS, Outcome, Results
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.models.sampler_file import load_sampler_file
from tests.distributed.harness import run_ranks
from tests.generation.cases import Forced, expected, lowered, partitioned, run, sampling_of, written

STEPS, WORLD = 50, 4
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


def difference(latents: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest, relative to the largest number of the reference."""
    return float((latents - reference).abs().max() / reference.abs().max())


def at_outcomes(folder: Path, program: Module, switch: Switch, outcomes: Sequence[int]) -> dict[int, torch.Tensor]:
    """The latents of the first request for each of these K. The ranks build and capture their models once."""
    told = run_ranks(len(program.programs), _at_outcomes, folder, print_module(program), switch, outcomes)
    latents: dict[int, torch.Tensor] = {}
    for rank in told:
        for outcome, steps, produced in rank:
            assert steps == STEPS
            latents[outcome] = torch.tensor(produced)
    assert sorted(latents) == sorted(outcomes)
    return latents


def _at_outcomes(
    folder: Path, program: str, switch: Switch, outcomes: Sequence[int]
) -> list[tuple[int, int, list[object]]]:
    sampler, module, models = load_sampler_file(folder / "sampler.py"), parse_module(program), None
    settings = Settings(str(folder / "sampler.py"), ("large", "small"), str(switch))
    told: list[tuple[int, int, list[object]]] = []
    for outcome in outcomes:
        sampling = sampling_of(sampler, Forced(switch.kind, switch.value, switch.least, switch.most, outcome))
        results = Results(folder / "out", settings, sampler.digest)
        ended: list[Outcome] = []
        rank = GenerationRank(
            dist.get_rank(), sampling, module, REQUESTS[:1], results, torch.device("cpu"), ended.append
        )
        rank.models = models = models or rank.models
        rank.connect()
        rank.run()
        rank.groups.close()
        rank.connections.close()
        for end in ended:
            told.append((outcome, end.steps, load_file(results.latents(REQUESTS[0]))[LATENTS].tolist()))
    return told


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rule = parse_switch("fixed=17")
        sampling = sampling_of(written(folder), rule)
        references = {str(request.id): expected(sampling, request) for request in REQUESTS}
        for plan, works in PLANS.items():
            program = lowered(partitioned(sampling, REQUESTS, WORLD), works)
            latents = {id: produced for id, (_, produced) in run(folder, program, rule, REQUESTS).items()}
            worst = max(
                difference(produced, references[id]) for id, produced in latents.items() if produced is not None
            )
            rows.append({"what": plan, "relative_difference": worst})
            print(f"{plan:34} {worst:.1e}", flush=True)
        adaptive = Switch("adaptive", 0.1, least=0, most=STEPS)
        module = partitioned(sampling_of(sampling.sampler, adaptive), REQUESTS[:1], 2, length=10)
        ranks = ((0,), (1,), (0, 1))
        program = lowered(module, {c.name: {"ranks": ranks[n % 3]} for n, c in enumerate(module.cascades)})
        worst = 0.0
        for outcome, produced in at_outcomes(folder, program, adaptive, range(STEPS + 1)).items():
            fixed = sampling_of(sampling.sampler, parse_switch(f"fixed={outcome}"))
            worst = max(worst, difference(produced, expected(fixed, REQUESTS[0])))
        rows.append({"what": f"every K from 0 to {STEPS} through one program", "relative_difference": worst})
        print(f"{rows[-1]['what']:34} {worst:.1e}", flush=True)
        program = lowered(partitioned(sampling_of(sampling.sampler, adaptive), REQUESTS[:1], 1, length=10), {})
        ends = at_outcomes(folder, program, adaptive, (0, STEPS))
        for outcome, name in ((0, "small"), (STEPS, "large")):
            one = parse_switch("fixed=0")  # branches batched as above: one by one they are equal to rounding only
            of_one = lowered(partitioned(sampling_of(sampling.sampler, one, name), REQUESTS[:1], 1, length=10), {})
            alone = run(folder, of_one, one, REQUESTS[:1], name)["a"][1]
            assert alone is not None
            rows.append(
                {"what": f"K = {outcome} is {name} alone", "relative_difference": difference(ends[outcome], alone)}
            )
            print(f"{rows[-1]['what']:34} {rows[-1]['relative_difference']:.1e}", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
