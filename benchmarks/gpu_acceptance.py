"""Everything that has to be seen on a GPU, in twenty minutes on one H100 or H200, or on several.

    python benchmarks/gpu_acceptance.py                   # writes benchmarks/results/gpu_acceptance_<device>.json
    python benchmarks/gpu_acceptance.py --dry -o dry.json # tiny sizes on the processor: that the script works, no more
    python benchmarks/gpu_acceptance.py --sections profiled,host_memory,sampling,resumed  # whole runs alone

| section         | what it shows                                                                                      |
|-----------------|----------------------------------------------------------------------------------------------------|
| waits           | which calls of the host wait for a kernel that runs, as a pending collective does                  |
| parity          | gradients over NCCL in fp32 and bf16, against a plain loop; with several GPUs all ways of sharing  |
| ranks           | every schedule, cells, host memory, encoders: the tests of several ranks, all on one GPU over NCCL |
| rowwise_kernels | every kernel's outputs and gradients against float64; times beside eager and a copy                |
| attention       | blocks of attention, merged, against float64; times beside torch's own                             |
| sparse          | attention over lists of key blocks, and the choice of them; times beside the fastest dense one     |
| training        | Wan2.1-1.3B at three lengths: MFU, step time and memory, planned and measured                      |
| blocks          | a Wan2.1 block, 1.3B and 14B wide: fused against eager, and how long the device waits for launches |
| profiled        | a profile measured here, and what it predicts of steps of clips of other lengths                   |
| host_memory     | a model that lies in pinned host memory: gradients, memory and step time beside it on the device   |
| sampling        | latents of `generate` against Diffusers' own pipeline; a switch of models that comes when it comes |
| sparse_training | whole steps with sparse attention beside dense ones, Wan2.1 of six blocks, as planned and measured |
| resumed         | losses behind a checkpoint, its export, and runs with sparse attention and fused kernels           |

Each section is a process of its own, with a share of the time; what one leaves, the next may use. Results are written
as they come, so that a call that is cut off leaves what it had. The exit code is 1 where something is wrong, failed or
ran out of time. Nothing is downloaded; weights are random.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # also where arachnec is not installed

SCHEMA = 1
SHARES = {  # s
    "waits": 20,
    "parity": 100,
    "ranks": 120,
    "rowwise_kernels": 40,
    "attention": 25,
    "sparse": 45,
    "training": 170,
    "blocks": 90,
    "profiled": 170,
    "host_memory": 120,
    "sampling": 90,
    "sparse_training": 100,
    "resumed": 120,
}
EXACT = frozenset({"parity", "sampling", "resumed"})  # without TF32, which is another precision than fp32
DRY = 4  # times the share, of a processor that others use too
GRACE_S = 5.0
RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the processor; measures nothing")
    parser.add_argument("--sections", default=",".join(SHARES), help=f"any of {', '.join(SHARES)}")
    parser.add_argument("--gpus", type=int, help="how many to use; default: all")
    parser.add_argument("-o", "--output", type=Path, help="keep the results here as JSON")
    parser.add_argument("--one", nargs=3, metavar=("SECTION", "END", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sections = arguments.sections.split(",")
    if unknown := set(sections) - set(SHARES):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    if arguments.dry and arguments.output is None:
        parser.error("--dry needs --output: its results are none")
    head = described(dry=arguments.dry, gpus=arguments.gpus)
    if not head["gpus"]:
        sys.exit("no CUDA device: --dry -o FILE shows that the script works")
    if arguments.one is not None:
        return run_section(*arguments.one, dry=arguments.dry, gpus=head["gpus"])
    output = arguments.output or RESULTS / f"gpu_acceptance_{'_'.join(head['device'].lower().split())}.json"
    results = run_all(sections, head, output)
    print(f"{'right' if results['right'] else 'WRONG'} after {results['seconds']:.0f} s, see {output}")
    return 0 if results["right"] else 1


def described(*, dry: bool, gpus: int | None) -> dict[str, Any]:
    """The machine and the versions."""
    import torch
    import triton

    there = 1 if dry else torch.cuda.device_count()
    device = "dry run on a processor" if dry else torch.cuda.get_device_name() if there else ""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    chosen = gpus or there if dry else min(gpus or there, there)
    return {"schema": SCHEMA, "dry": dry, "device": device, "gpus": chosen, **versions, "started": started}


def run_all(sections: list[str], head: dict[str, Any], output: Path) -> dict[str, Any]:
    """The results, also written again after every row."""
    started = time.monotonic()
    results: dict[str, Any] = {**head, "seconds": 0.0, "right": False, "sections": {}}
    output.parent.mkdir(parents=True, exist_ok=True)
    spare = 0.0
    for name in sections:
        section: dict[str, Any] = {"state": "running", "seconds": 0.0, "rows": []}
        results["sections"][name] = section
        began, given = time.monotonic(), (SHARES[name] + spare) * (DRY if head["dry"] else 1)
        for row in rows_of(name, section, given, head):
            section["rows"].append(row)
            section["seconds"], results["seconds"] = time.monotonic() - began, time.monotonic() - started
            print(name, json.dumps(row), flush=True)
            write(output, results)
        section["seconds"], results["seconds"] = time.monotonic() - began, time.monotonic() - started
        spare = 0.0 if head["dry"] else max(0.0, given - section["seconds"])
        print(f"{name}: {section['state']} after {section['seconds']:.0f} s {section.get('error', '')}", flush=True)
        write(output, results)
    results["right"] = all(is_right(section) for section in results["sections"].values())
    write(output, results)
    return results


def is_right(section: dict[str, Any]) -> bool:
    return (
        section["state"] == "done" and bool(section["rows"]) and all(row.get("right", True) for row in section["rows"])
    )


def rows_of(name: str, section: dict[str, Any], given: float, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a section as its process writes them. Sets the section's state, and why it failed where it did."""
    with tempfile.TemporaryDirectory(prefix="acceptance_") as scratch:
        end = time.monotonic() + given
        command = [sys.executable, __file__, "--gpus", str(head["gpus"]), "--one", name, str(end), scratch]
        command += ["--dry", "--output", scratch] if head["dry"] else []
        # TF32 is another precision than fp32, and convolutions would use it.
        environment = {**os.environ} | ({"NVIDIA_TF32_OVERRIDE": "0"} if name in EXACT else {})
        if not head["dry"]:  # models are built, and an optimizer in host memory steps, on the processor
            environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // head["gpus"])))
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, cwd=ROOT
        )
        late = threading.Event()
        timer = threading.Timer(given, stop, (process, late))
        timer.start()
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                if "failed" in row:
                    section["error"] = row["failed"]
                else:
                    yield row
        timer.cancel()
        section["state"] = "done" if process.returncode == 0 else "out of time" if late.is_set() else "failed"
        if section["state"] == "failed":
            section.setdefault("error", f"the section's process ended with exit code {process.returncode}")


def stop(process: subprocess.Popen[str], late: threading.Event) -> None:
    """End the section and the ranks that it started: these have sessions of their own, and their agent ends them."""
    late.set()
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run_section(name: str, end: str, scratch: str, *, dry: bool, gpus: int) -> int:
    """In a process of its own: the section's rows, a line each, where standard output was."""
    from acceptance.machine import Machine

    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no row
    try:
        section = importlib.import_module(f"acceptance.{name}")
        for row in section.rows(Machine(dry, gpus, float(end), Path(scratch))):
            print(json.dumps(row), file=channel, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"failed": f"{type(error).__name__}: {str(error)[-2000:]}"}), file=channel, flush=True)
        return 1
    return 0


def write(output: Path, results: dict[str, Any]) -> None:
    """Whole or not at all."""
    partial = output.with_suffix(".part")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(output)


if __name__ == "__main__":
    sys.exit(main())
