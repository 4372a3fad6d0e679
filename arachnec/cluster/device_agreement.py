"""Whether the devices of all ranks go together, with each other and with what was planned for.

The ranks' records are exchanged through the rendezvous store, before any collective; every rank compares them alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from arachnec.cluster.detect import find_by_driver_name
from arachnec.cluster.device_selection import MASK, DeviceRecord
from arachnec.cluster.device_specs import find_device_specs
from arachnec.cluster.topology import machines
from arachnec.ir.diagnostic import Diagnostic, Mistake, UserError
from arachnec.ir.nodes import Cluster

K = TypeVar("K")
MEMORY_SLACK = 1.0  # GiB that a driver may report less than the specs say


def check_devices(records: Sequence[DeviceRecord], planned: Cluster | None = None) -> tuple[str, ...]:
    """Compare the devices of all ranks with each other and with those that were planned for.

    Returns what a person should know of them. Raises ``UserError``, the same on every rank, where they do not go
    together: it names the ranks that differ.
    """
    problems = list(_problems(records, planned))
    if problems:
        raise UserError(*problems)
    return tuple(_notes(records, planned))


def _problems(records: Sequence[DeviceRecord], planned: Cluster | None) -> Iterator[Diagnostic]:
    lacking = [record for record in records if record.missing]
    if lacking:
        for host, here in _grouped(lacking, lambda record: record.host).items():
            yield Mistake(
                None,
                f"{ranks_of(here)} on host {host} {'have' if len(here) > 1 else 'has'} no GPU: {_visible(here[0])}",
                help=(
                    "start as many ranks on a node as it has GPUs, or give every task one GPU of its own "
                    "(--gpus-per-task=1). A GPU that nvidia-smi does not list has failed: leave the node out "
                    f"(--exclude={host})"
                ),
            )
        return
    gpus = [record for record in records if record.kind == "cuda"]
    shared = _grouped(gpus, lambda record: (record.host, record.uuid or (record.mask, record.index)))
    crowded = [here for here in shared.values() if len(here) > 1]
    if crowded:
        for here in crowded:
            yield Mistake(
                None,
                f"{ranks_of(here)} on host {here[0].host} would share one GPU ({here[0].name}, {_visible(here[0])})",
                help=(
                    "give every rank a GPU of its own: all GPUs of the node visible to all its ranks, or another one "
                    f"to each. If the node has lost a GPU, leave it out (--exclude={here[0].host})"
                ),
            )
        return
    rest = [record for record in records if record.kind == "cpu"]
    if gpus and rest:
        yield Mistake(
            None,
            f"{ranks_of(rest)} would run on the CPU, {ranks_of(gpus)} on GPUs",
            help=(
                f"make the GPUs of {', '.join(sorted({record.host for record in rest}))} visible ({MASK}, and a torch "
                "built for CUDA), or leave it out"
            ),
        )
        return
    yield from _unlike_versions(records)
    if gpus:
        yield from _unlike_names(gpus, planned)
        yield from _too_small(gpus, planned)


def _unlike_versions(records: Sequence[DeviceRecord]) -> Iterator[Diagnostic]:
    for part in sorted({part for record in records for part in record.versions}):
        for version, few, common, most in _minorities(records, partial(_version, part)):
            yield Mistake(
                None,
                f"{ranks_of(few)} have {part} {version}, {ranks_of(most)} {common}",
                help="install the same versions on every node, or run all ranks from one environment",
            )


def _version(part: str, record: DeviceRecord) -> str:
    return record.versions.get(part, "none")


def _unlike_names(records: Sequence[DeviceRecord], planned: Cluster | None) -> Iterator[Diagnostic]:
    for alike in _grouped(records, lambda record: _planned_device(record, planned)).values():
        for name, few, common, most in _minorities(alike, lambda record: record.name):
            yield Mistake(
                None,
                f"{ranks_of(few)} have {name}, {ranks_of(most)} {common}, and the plan takes them for alike",
                help="leave these nodes out, or compile for a cluster file that says which nodes differ (`mixed`)",
            )


def _too_small(records: Sequence[DeviceRecord], planned: Cluster | None) -> Iterator[Diagnostic]:
    small = [record for record in records if record.memory < _planned_device(record, planned)[1] - MEMORY_SLACK]
    for here in _grouped(small, lambda record: (record.name, _planned_device(record, planned))).values():
        device, needed = _planned_device(here[0], planned)
        yield Mistake(
            None,
            f"{ranks_of(here)} have {here[0].name} with {here[0].memory:.0f} GiB, the plan is for {device} with "
            f"{needed:.0f} GiB",
            help="compile again with --cluster for this machine; `arachnec cluster detect` writes its file",
        )


def _notes(records: Sequence[DeviceRecord], planned: Cluster | None) -> Iterator[str]:
    names = {(record.name, _planned_device(record, planned)[0]) for record in records if record.kind == "cuda"}
    for name, device in sorted(names):
        specs, wanted = find_by_driver_name(name), find_device_specs(device)
        if specs is not None and wanted is not None and specs is not wanted:
            yield f"planned for {device}, run on {name}: planned times do not apply"


def _planned_device(record: DeviceRecord, planned: Cluster | None) -> tuple[str, float]:
    """The device that the plan has at a rank, and its GiB; nothing where there is no plan for that rank."""
    if planned is None or not planned.world:
        return "", 0.0
    every = machines(planned)
    machine = every[min(record.rank // planned.gpus, len(every) - 1)]
    return machine.device, machine.memory


def _minorities(
    records: Sequence[DeviceRecord], part: Callable[[DeviceRecord], str]
) -> Iterator[tuple[str, list[DeviceRecord], str, list[DeviceRecord]]]:
    """For each value that is not the commonest: it, the ranks that have it, the commonest, and the ranks with that."""
    by_value = _grouped(records, part)
    counts = Counter({value: len(here) for value, here in by_value.items()})
    common = counts.most_common(1)[0][0]  # of equally common ones that of the lowest rank
    for value, here in by_value.items():
        if value != common:
            yield value, here, common, by_value[common]


def _grouped(records: Sequence[DeviceRecord], key: Callable[[DeviceRecord], K]) -> dict[K, list[DeviceRecord]]:
    groups: dict[K, list[DeviceRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def _visible(record: DeviceRecord) -> str:
    mask = f"{MASK} is not set" if record.mask is None else f"{MASK}={record.mask}"
    installed = f", {record.installed} installed" if record.installed else ""
    return f"{record.visible} visible to rank {record.rank} for {record.wanted} ranks on the host{installed}; {mask}"


def ranks_of(records: Iterable[DeviceRecord]) -> str:
    """``rank 3``, ``ranks 0, 8-15``."""
    numbers = sorted(record.rank for record in records)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"
