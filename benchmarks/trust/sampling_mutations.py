"""Lowered programs of requests broken in one place: each is refused by ``check``, or gives the latents of a plain loop.

As ``program_mutations.py``, of programs that sample: two models, encoder and decoder, requests alone and batched, whose
segments lie on one rank, are shared by several, split by branches, and handed on; one with an adaptive switch. What is
accepted is executed by the ranks of ``arachnec generate``, over gloo, on models of a few numbers.

    python -m benchmarks.trust.sampling_mutations --mutations 200 -o benchmarks/results/sampling_mutations.json
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from arachnec.data.requests import Request
from arachnec.data.switch import Switch
from arachnec.equivalence.execution import Failed, on_forked_ranks
from arachnec.ir.nodes import Module
from arachnec.planning.sampling.requests import segmented
from arachnec.sampling.loop import Sampling
from benchmarks.trust.text_mutations import MUTATIONS, accepted, rows_of
from tests.generation import cases

SECONDS = 30.0  # until a program that stands still is given up
ADAPTIVE = Switch("adaptive", 0.1, least=1, most=5)
A, B, C = cases.REQUESTS
ALIKE = (A, replace(A, id="a2", caption="a cat", seed=5), C)
EDGES = {"r0.0": {"ranks": (1, 0)}, "r1.1": {"ranks": (0, 1), "ring": 2}, "r2.0": {"ranks": (0, 1), "shards": (13, 7)}}
BRANCHES = {f"r{n}.{s}": {"ranks": (0, 1), "side": 2} for n in range(2) for s in range(2)}
APART = {"r0.text": {"ranks": (1,)}, "r0.0": {"ranks": (1,)}, "r2.1": {"ranks": (1,)}}


@dataclass(frozen=True)
class Source:
    """A program that is right, what it samples, and the latents that it gives, by request."""

    program: Module
    sampling: Sampling
    requests: tuple[Request, ...]
    expected: Mapping[str, Tensor]


def sources(folder: Path) -> dict[str, Source]:
    sampler = cases.written(folder, cases.ENCODER + cases.DECODER)
    fixed = cases.sampling_of(sampler, cases.FIXED)
    adaptive = cases.sampling_of(sampler, cases.Forced("adaptive", 0.1, least=1, most=5, outcome=3))
    planned = replace(adaptive, switch=ADAPTIVE)
    alternating = {f"r0.{k}": {"ranks": ((0,), (1,), (0, 1))[k % 3]} for k in range(9)}

    def of(sampling: Sampling, requests: tuple[Request, ...], works: Mapping[str, Mapping[str, object]], *,
           plan: Sampling | None = None, batch: int = 1) -> Source:  # fmt: skip
        module = cases.partitioned(plan or sampling, requests, 2)
        if batch > 1:
            module = segmented(module, length=2, batch=batch)
        known = {cascade.name for cascade in module.cascades}
        program = cases.lowered(module, {name: work for name, work in works.items() if name in known})
        steps = cases.sampling_of(sampler, cases.parse_switch("fixed=3"))
        return Source(program, sampling, requests, {str(r.id): cases.expected(steps, r) for r in requests})

    return {
        "edges": of(fixed, (A, B, C), EDGES),
        "branches": of(fixed, (A, B), BRANCHES),
        "batched": of(fixed, ALIKE, APART, batch=2),
        "adaptive": of(adaptive, (A,), alternating, plan=planned),
    }


def executed(source: Source, program: Module, folder: Path) -> str:
    """What is wrong with what the ranks of a program give; nothing where it is right."""
    out = folder / "out"
    for file in out.glob("*") if out.is_dir() else ():
        file.unlink()
    out.mkdir(exist_ok=True)
    try:
        on_forked_ranks(len(program.programs), partial(_rank, source, program, folder), SECONDS)
    except Failed as failure:
        return failure.text.strip().splitlines()[-1][:200]
    for name, right in source.expected.items():
        file = out / f"{name}.safetensors"
        if not file.exists():
            return f"request {name} has no result"
        latents = cases.load_file(file)[cases.LATENTS]
        if latents.shape != right.shape or not torch.allclose(latents, right, rtol=1e-4, atol=1e-5):
            return f"the latents of request {name} differ by {float((latents - right).abs().max()):.3g}"
    return ""


def _rank(source: Source, program: Module, folder: Path, rank: int) -> None:
    settings = cases.Settings(str(folder / "sampler.py"), source.sampling.names, str(source.sampling.switch))
    results = cases.Results(folder / "out", settings, source.sampling.sampler.digest)
    device = torch.device("cpu")
    runs = cases.GenerationRank(rank, source.sampling, program, source.requests, results, device, lambda outcome: None)
    runs.connect()
    runs.run()


def judged(source: Source, text: str, folder: Path) -> tuple[str, str]:
    """What became of a mutation: refused, unchanged, harmless or SURVIVES; and by what."""
    module = accepted(source.program, text)
    if isinstance(module, tuple):
        return module
    wrong = executed(source, module, folder)
    return ("SURVIVES", wrong) if wrong else ("harmless", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    kinds: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    survivors: list[dict[str, object]] = []
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="arachnec-sampling-") as place:
        known = sources(Path(place))
        for name, source in known.items():
            if wrong := executed(source, source.program, Path(place)):
                raise SystemExit(f"{name} is wrong before any mutation: {wrong}")
        while kinds.total() < options.mutations:
            name, mutate = rng.choice(sorted(known)), rng.choice(MUTATIONS)
            rows = rows_of(known[name].program)
            try:
                mutate(rows, rng)
            except IndexError:
                continue
            kind, why = judged(known[name], "\n".join(rows) + "\n", Path(place))
            if kind == "unchanged":
                continue
            kinds[kind] += 1
            if kind == "refused":
                rules[why] += 1
            if kind == "SURVIVES":
                old = rows_of(known[name].program)
                lines = [row for row in rows if row not in old] + [f"- {row}" for row in old if row not in rows]
                survivors.append({"program": name, "mutation": mutate.__name__, "lines": lines[:4], "why": why})
                print(json.dumps(survivors[-1]), flush=True)
            wall = round(time.time() - started)
            result = {"mutations": kinds.total(), "seed": options.seed, **kinds, "rules": dict(rules.most_common()),
                      "survivors": survivors, "wall_s": wall}  # fmt: skip
            if options.output:
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
