"""A profile of this machine: the ranks that measure, and the fit of what they found."""

from __future__ import annotations

import os
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from arachnec.backends.torch_distributed.reporting.events import decode
from arachnec.backends.torch_distributed.reporting.report import Note
from arachnec.cluster.file import parse_cluster
from arachnec.cost.profile import (
    Collective,
    LinkProfile,
    Measurement,
    Profile,
    Synchronisation,
    fit_profile,
    write_profile,
)
from arachnec.cost.sparse_profile import AttentionTime, fit_sparse
from arachnec.data.manifest import read_manifest
from arachnec.data.requests import read_requests
from arachnec.ir.diagnostic import user_error
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Cluster
from arachnec.ir.stage_sizes import crowding
from arachnec.launch.environment import shown_gpus
from arachnec.launch.local_ranks import crash_told, launch
from arachnec.models.file import MODEL_FILE, demand_python_file, load_model_file

WORKER = "arachnec.profiling.profiler"
SAMPLER_WORKER = "arachnec.profiling.sampler_profiler"


class Measured(msgspec.Struct, frozen=True):
    """What the ranks found: (stage, phase, measurements), the links under plain messages, and the end."""

    device: str
    stages: list[tuple[str, str, list[Measurement]]]
    links: LinkProfile | None
    synchronisation: list[Synchronisation]
    collectives: list[Collective] = []
    attention: list[AttentionTime] = []  # of heads of ``head_size``
    head_size: int = 0
    dtype: str = ""  # of the trained model's parameters


def profile_here(
    model: Path,
    data: Path,
    cluster: str | Path,
    output: Path,
    *,
    samples: bool = False,
    dtype: str = "fp32",
    columns: str = "",
    seconds: float = 120.0,
    reporter: Reporter = unreported,
) -> Profile:
    """Measure on as many local ranks as the cluster has, fit, and write the profile. ``samples``: a sampler file;
    ``dtype`` is the training option: ``fp32`` leaves the model as it is built. ``columns`` as for ``read_manifest``;
    ``seconds`` is the budget of the ranks.

    Interrupted, or told to end, it writes what was measured so far, reports that, and ends as it was told to. Raises
    ``UserError`` for a malformed input or too few GPUs, before anything starts, and for what fails on a rank.
    """
    machine = parse_cluster(cluster)
    if samples:
        from arachnec.models.sampler_file import load_sampler_file

        read_requests(data)
        load_sampler_file(model)
    else:
        demand_python_file(model, MODEL_FILE)
        read_manifest(data, columns=columns)
        load_model_file(model)
    _demand_devices(machine)
    with crash_told(), tempfile.TemporaryDirectory(prefix="arachnec-") as scratch:
        results = Path(scratch) / "measured.json"
        arguments = [str(model), str(data), str(machine.attrs["device"]), str(measuring_at_once(machine)), str(results)]
        arguments += [str(seconds)] if samples else [str(seconds), dtype, columns]
        try:
            reporter("starting ranks")
            worker = SAMPLER_WORKER if samples else WORKER
            launch(machine.world, arguments, lambda line: reporter(_text(line)), worker=worker)
        except (KeyboardInterrupt, SystemExit):
            if results.is_file():
                write_profile(fitted(_read(results), machine), output)
                reporter(f"interrupted: wrote what was measured so far to {output}")
            raise
        profile = fitted(_read(results), machine)
    write_profile(profile, output)
    return profile


def _read(results: Path) -> Measured:
    return msgspec.json.decode(results.read_bytes(), type=Measured)


def _text(line: bytes) -> str:
    event = decode(line)
    return event.text if isinstance(event, Note) else ""


def _demand_devices(machine: Cluster) -> None:
    import torch

    device = str(machine.attrs["device"])
    with shown_gpus(os.environ):
        count = torch.cuda.device_count()
    if device != "cpu" and count < machine.world:
        raise user_error(
            f"GPUs that torch finds on this machine: {count}; needed are {machine.world} x {device}",
            help=f"measure on a machine that has them; `--cluster {machine.world}:cpu` measures this one's processors",
        )


def fitted(measured: Measured, machine: Cluster) -> Profile:
    """The profile of what the ranks of this machine found."""
    name = f"{platform.machine()}, {os.cpu_count()} cores, {measuring_at_once(machine)} ranks at once"
    profile = fit_profile(
        measured.stages,
        machine=name,
        device=measured.device,
        links=measured.links,
        synchronisation=measured.synchronisation,
        collectives=measured.collectives,
        dtype=measured.dtype,
        sparsity=[fit_sparse(measured.head_size, measured.attention)] if measured.attention else [],
    )
    return msgspec.structs.replace(profile, measured_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")


def measuring_at_once(machine: Cluster) -> int:
    """How many ranks measure at one time: all, or as many as have a core each where the cluster says so."""
    return max(1, int(machine.world / crowding(machine)))
