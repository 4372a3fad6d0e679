"""Gradients of every model under tests/acceptance/models, under plans of every kind, against a plain PyTorch loop.

    python benchmarks/gradient_parity.py [MODEL ...] [--plans mixed,ring] [--command-line]

For each model, a loop that knows nothing of arachnec but the documented seeds goes over the clips of
tests/acceptance/clips.jsonl (15 to 120 tokens; equal clips; captions exactly as long as a token shard) and takes the
mean of their losses. Each plan is compiled, run on 4 gloo ranks for one step, and its saved gradients are compared:

    error = max over parameters of |difference| / max(|gradient|, 1e-3 |whole gradient|)    must be at most 1e-5
    loss  = |difference| / |loss|                                                           must be at most 1e-6

A model that cannot be split is refused; the table then shows the message. The ranks are forks of this process, so that
nothing is imported and traced four times; ``--command-line`` goes through ``arachnec compile`` and ``arachnec run``
instead, as a person would, and takes about ten times as long. The sweep of all models takes about half an hour.

``--float64`` has parameters and values in double precision: a difference that is gone then was rounding, as that
of `sana_wm`. (A model that computes a part in float32 whatever it is given still does.)
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ACCEPTANCE = ROOT / "tests" / "acceptance"
MODELS = ACCEPTANCE / "models"
PASSES = ACCEPTANCE / "passes.py"
RANKS = 4
SEED = 0
GRADIENT, LOSS = 1e-5, 1e-6

START, END = "partition{policy=equal-token},annotate,", "bucket{mib=0},lower,check"  # a bucket for every layer
PLANS = {
    "default": "default",
    "data-parallel": "data-parallel",
    "mixed": START + "assign{degrees=[3,1,4,2]},place," + END,
    "ulysses": START + "assign{degrees=[4,3,2]},place,regrid{ulysses=[12]}," + END,
    "ring": START + "assign{degrees=[3,4,2]},place,regrid{ulysses=[1]}," + END,
    "product": START + "assign{degrees=[4]},place,regrid{ulysses=[2]}," + END,
    "recompute": START + "assign{degrees=[1,4,2,3],recompute=true},place,regrid{ulysses=[2,1,3]}," + END,
    "skewed": START + "assign{degrees=[4,2,3,4]},place,regrid{ulysses=[4,1,3,2],skew=true}," + END,
}
DEGREES = {"mixed": {1, 2, 3, 4}, "skewed": {2, 3, 4}}


def read_clips(path: Path) -> list[types.SimpleNamespace]:
    """The manifest, read without arachnec: equal clips are ID.0, ID.1, ..."""
    clips = []
    for number, line in enumerate(path.read_text().splitlines()):
        row = {"id": number, "caption": None, "path": None, "start": 0, **json.loads(line)}
        count = row.pop("clips", 1)
        for copy in range(count):
            name = row["id"] if count == 1 else f"{row['id']}.{copy}"
            clips.append(types.SimpleNamespace(**{**row, "id": name}, encoded={}))
    return clips


def import_file(path: Path):
    spec = importlib.util.spec_from_file_location(f"plain_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


DOUBLE = """

import torch as _torch
from torch.utils._pytree import tree_map_only as _tree_map_only

_build, _sample = build, sample


def build():
    return _build().double()


def sample(clip, generator):
    values = _sample(clip, generator)
    return _tree_map_only(_torch.Tensor, lambda own: own.double() if own.is_floating_point() else own, values)
"""


def in_float64(model_file: Path, folder: Path) -> Path:
    """The model file, of double precision."""
    place = folder / f"{model_file.stem}_float64.py"
    place.write_text(model_file.read_text() + DOUBLE)
    return place


def plain_loop(model_file: Path, clips, gradients: Path, step: int = 0, device: str = "cpu") -> float:
    """One clip after the other on one process; writes the gradients, returns the mean loss.

    Weights: ``torch.manual_seed(seed)`` before ``build()``. A clip's generator: BLAKE2b of "seed/step/id", 63 bits.
    """
    import torch
    from safetensors.torch import save_file
    from torch.utils._pytree import tree_map_only

    user = import_file(model_file)
    torch.manual_seed(SEED)
    model = user.build().train().to(device)
    total = 0.0
    for clip in clips:
        digest = hashlib.blake2b(f"{SEED}/{step}/{clip.id}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        arguments, target = tree_map_only(torch.Tensor, lambda value: value.to(device), user.sample(clip, generator))
        output = model(**arguments)
        if isinstance(output, dict):
            output = next(iter(output.values()))
        loss = user.loss(output[0] if isinstance(output, tuple) else output, target) / len(clips)
        loss.backward()
        total += loss.item()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in trained.items()}
    save_file({name: gradient.contiguous() for name, gradient in saved.items()}, gradients)
    return total


def compare(expected: Path, actual: Path) -> tuple[float, str]:
    """The largest error of a parameter, and that parameter's name."""
    from safetensors.torch import load_file

    a, b = load_file(expected), load_file(actual)
    if a.keys() != b.keys():
        return float("inf"), f"other parameters: {', '.join(sorted(a.keys() ^ b.keys()))}"
    whole = sum(float(g.double().square().sum()) for g in a.values()) ** 0.5
    errors = {
        name: float((a[name].double() - b[name].double()).norm()) / max(float(a[name].double().norm()), 1e-3 * whole)
        for name in a
    }
    if any(error != error for error in errors.values()):
        return float("nan"), next(name for name, error in errors.items() if error != error)
    name = max(errors, key=errors.get)
    return errors[name], name


class Bench:
    """Runs functions in forks of this process, which has imported everything already."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("fork")

    def call(self, function, *arguments, timeout: float = 300.0):
        """``function(*arguments)`` in a fork; raises RuntimeError with what it raised."""
        reading, writing = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_answer, args=(writing, function, arguments))
        process.start()
        writing.close()
        answer = None
        if reading.poll(timeout):
            with contextlib.suppress(EOFError):
                answer = reading.recv()
        process.join(5)
        process.kill()
        if answer is None:
            raise RuntimeError(f"no answer within {timeout:g} s, exit code {process.exitcode}")
        kind, value = answer
        if kind == "error":
            raise RuntimeError(value)
        return value


def _answer(connection, function, arguments) -> None:
    from arachnec.ir.diagnostic import UserError

    try:
        connection.send(("value", function(*arguments)))
    except UserError as error:
        connection.send(("error", "REFUSED " + str(error)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    os._exit(0)


def run_plans(model_file: Path, data: Path, plans: dict[str, str], folder: Path) -> dict[str, tuple]:
    """Compile and run every plan in forks; plan to (loss, gradients) or (None, message)."""
    from arachnec.cluster.file import parse_cluster
    from arachnec.data.manifest import read_manifest
    from arachnec.driver import front_end, plan_iteration, plan_model, trace_file
    from arachnec.executable.folder import write_executable
    from arachnec.models.file import load_model_file
    from arachnec.passes.infra.base import installed, load_file
    from arachnec.passes.infra.pipeline import Pipeline

    loaded = load_model_file(model_file)
    manifest = read_manifest(data)
    traced = front_end(trace_file(loaded, manifest), manifest, parse_cluster(f"{RANKS}:cpu"))
    registry = load_file(PASSES, installed())
    capture = captured(loaded, manifest.clips, next(stage for stage in traced.stages if stage.trained))
    results: dict[str, tuple] = {}
    for name, text in plans.items():
        try:
            pipeline = Pipeline.parse(text, registry)
            model, _ = plan_model(traced, pipeline)
            program, _ = plan_iteration(model, pipeline, 0)
            place = write_executable(
                folder / name, program=program, traced=traced, model=model, pipeline=str(pipeline),
                model_file=loaded, clips=manifest.clips, load=[PASSES],
            )  # fmt: skip
            results[name] = run_ranks(place, capture, folder / f"{name}.safetensors")
        except Exception as error:
            results[name] = None, message_of(error)
    return results


def captured(model_file, clips, stage):
    """What every rank would capture at launch; taken once, here, before the ranks are forked. None where graphs are
    for one clip shape: each rank captures those that it needs."""
    import torch

    from arachnec.spmd.specialise import Graphs, Specialisation, captured_again

    step = Specialisation.of(stage)
    torch.manual_seed(SEED)
    if step.graphs is not Graphs.ONE:
        return None
    try:
        return captured_again(step, model_file.build(), model_file, clips)
    except Exception as error:
        return error


def run_ranks(place: Path, capture, gradients: Path) -> tuple:
    context = multiprocessing.get_context("fork")
    store = place / "rendezvous"
    connections, ranks = [], []
    for rank in range(RANKS):
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(writing, _rank, (rank, store, place, capture, gradients)))
        process.start()
        writing.close()
        connections.append(reading)
        ranks.append(process)
    end = time.monotonic() + 120
    error = None
    waiting = dict(enumerate(connections))
    while waiting and error is None and time.monotonic() < end:
        for rank, connection in list(waiting.items()):
            if connection.poll(0.05):
                kind, value = connection.recv()
                del waiting[rank]
                if kind == "error":
                    error = value
    for process in ranks:
        process.join(0.2 if error or waiting else 5)
        process.kill()
    if waiting and error is None:
        error = f"ranks {sorted(waiting)} did not end"
    if error:
        return None, message_of(RuntimeError(error))
    report = json.loads((place / "run.json").read_text())
    return report["steps"][-1]["loss"], gradients


def _rank(rank: int, store: Path, place: Path, capture, gradients: Path) -> None:
    import torch
    import torch.distributed as dist

    import arachnec.tracing.blocks as blocks
    import arachnec.tracing.sample as samples
    from arachnec.backends.torch_distributed.engine import train
    from arachnec.backends.torch_distributed.options import RunOptions
    from arachnec.executable.folder import read_executable

    def known(*_, **__):
        if isinstance(capture, Exception):
            raise capture
        return capture

    if capture is not None:
        samples.example_calls, blocks.capture_blocks = lambda *_, **__: [], known
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    train(read_executable(place), RunOptions(steps=1, save_gradients=gradients), torch.device("cpu"))
    dist.barrier()


def run_command_line(model_file: Path, data: Path, plans: dict[str, str], folder: Path) -> dict[str, tuple]:
    """The same by ``arachnec compile`` and ``arachnec run``."""
    results: dict[str, tuple] = {}
    for name, text in plans.items():
        place, gradients = folder / name, folder / f"{name}.safetensors"
        try:
            command("compile", model_file, "--data", data, "--cluster", f"{RANKS}:cpu", "-o", place,
                    "--passes", text, "--load", PASSES)  # fmt: skip
            command("run", place, "--ranks", RANKS, "--steps", 1, "--save-gradients", gradients)
        except RuntimeError as error:
            results[name] = None, message_of(error)
            continue
        results[name] = json.loads((place / "run.json").read_text())["steps"][-1]["loss"], gradients
    return results


def command(*words: object) -> str:
    """``arachnec WORDS``; raises RuntimeError with what it printed where it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(MODELS)]), "COLUMNS": "200"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, "-m", "arachnec.cli", *map(str, words)],
        capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(("REFUSED " if done.returncode == 2 else "") + done.stderr + done.stdout)
    return done.stdout


def message_of(error: BaseException) -> str:
    from arachnec.ir.diagnostic import UserError

    if isinstance(error, UserError):
        return "REFUSED " + str(error)
    return str(error) if isinstance(error, RuntimeError) else "".join(traceback.format_exception(error))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="names of files in tests/acceptance/models; default: all")
    parser.add_argument("--plans", default=",".join(PLANS), help=f"any of {', '.join(PLANS)}")
    parser.add_argument("--data", type=Path, default=ACCEPTANCE / "clips.jsonl")
    parser.add_argument("--command-line", action="store_true", help="go through arachnec compile and arachnec run")
    parser.add_argument("--float64", action="store_true", help="parameters and values in double precision")
    parser.add_argument("--verbose", action="store_true", help="print whole messages")
    arguments = parser.parse_args()
    plans = {name: PLANS[name] for name in arguments.plans.split(",")}
    names = arguments.models or sorted(p.stem for p in MODELS.glob("*.py") if p.stem != "parts")

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(ROOT), str(MODELS)]
    import diffusers.models.transformers
    import torch

    torch.set_num_threads(1)
    print(f"{RANKS} ranks, seed {SEED}; {torch.__version__=}, {diffusers.__version__=}")
    print(f"{'model':28} {'plan':14} {'gradient':>9} {'loss':>9}  result")
    bad = 0
    for name in names:
        bad += sweep(Bench(), MODELS / f"{name}.py", plans, arguments)
    print(f"{bad} failures")
    return 1 if bad else 0


def sweep(bench: Bench, model: Path, plans: dict[str, str], arguments: argparse.Namespace) -> int:
    """One model under all plans: a line for each. Returns how many were wrong."""
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = model.with_suffix(".jsonl") if model.with_suffix(".jsonl").is_file() else arguments.data
        file = in_float64(model, folder) if arguments.float64 else model
        expected = folder / "expected.safetensors"
        runner = run_command_line if arguments.command_line else run_plans
        try:
            loss = bench.call(plain_loop, file, read_clips(data), expected)
            results = bench.call(runner, file, data, plans, folder, timeout=1800)
        except RuntimeError as error:
            results = dict.fromkeys(plans, (None, str(error)))
        shown: set[str] = set()
        for plan, (planned, gradients) in results.items():
            if planned is None:
                refused = gradients.startswith("REFUSED ")
                bad += not refused
                text = "as above" if gradients in shown else gradients.removeprefix("REFUSED ")
                shown.add(gradients)
                text = text if arguments.verbose else last_line(text, refused)
                print(f"{model.stem:28} {plan:14} {'':>9} {'':>9}  {'refused' if refused else 'FAILED'}: {text}")
                continue
            error, worst = compare(expected, gradients)
            off = abs(planned - loss) / abs(loss)
            good = error <= GRADIENT and off <= LOSS
            bad += not good
            print(
                f"{model.stem:28} {plan:14} {error:9.1e} {off:9.1e}  {'equal' if good else f'WRONG: {worst}'}",
                flush=True,
            )
    sys.stdout.flush()
    return bad


def last_line(text: str, refused: bool) -> str:
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    return (lines[0] if refused else lines[-1])[:200] if lines else text


if __name__ == "__main__":
    sys.exit(main())
