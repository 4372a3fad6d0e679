"""A cluster file from what a machine says about itself: devices, NVLink or PCIe, a NIC for each GPU, NUMA.

What the machine cannot say stands in the file as a comment, with what was assumed instead: how many such nodes there
are, and how fast the network between them is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations

from arachnec.cluster.device_specs import DEVICE_SPECS, DeviceSpecs
from arachnec.cluster.nvidia_tools import Device, Matrix
from arachnec.ir.diagnostic import user_error

NVLINK = 25  # GB/s of one NVLink in one direction, from its second to its fourth generation
MIB_PER_GIB = 1024
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def cpu_file(cores: int, memory: float) -> str:
    """For a machine without GPUs: a rank a core. ``memory`` is the machine's, GiB."""
    share = max(1, int(memory / cores))
    return "\n".join(
        (
            f"# No GPU was found: {cores} gloo ranks on the processor's {cores} cores, in short {cores}:cpu.",
            "# Speeds of cores and links are assumptions; `arachnec profile` measures them.",
            "nodes = 1",
            f"gpus = {cores}",
            'device = "cpu"',
            f'memory = "{share} GiB"  # of {memory:.0f} GiB',
            "",
        )
    )


def cluster_file(matrix: Matrix | None, devices: Sequence[Device], host_memory: float | None = None) -> str:
    """The text of a cluster file for one node, whose host has so many GiB where that is known.

    Raises UserError where matrix and devices contradict each other.
    """
    names = sorted({device.name for device in devices})
    if len(names) > 1:
        raise user_error(
            f"the node has different devices: {', '.join(names)}",
            help="a cluster file describes nodes whose devices are alike; hide some with CUDA_VISIBLE_DEVICES",
        )
    if matrix is not None and devices and len(matrix.gpus) != len(devices):
        raise user_error(
            f"the link matrix has {len(matrix.gpus)} GPUs, the list of devices {len(devices)}",
            help="save both on the same machine",
        )
    count = len(matrix.gpus) if matrix is not None else len(devices)
    lines = [
        f"# One node of {count} {names[0] if names else 'GPUs'}.",
        "nodes = 1  # how many there are is not known here",
    ]
    lines.append(f"gpus = {count}")
    links = _links(matrix)
    specs, device_lines = _device(names, links)
    lines += device_lines
    if devices:
        lines += _memory(devices[0], specs)
    lines += _intra(matrix, links, specs)
    if host_memory is not None:
        lines.append(f'host_memory = "{int(host_memory)} GiB"  # what its devices may keep there')
    lines += _network(matrix, specs)
    lines += _numa(matrix)
    return "\n".join((*lines, ""))


def find_by_driver_name(name: str) -> DeviceSpecs | None:
    """The specs of ``NVIDIA H100 80GB HBM3`` and its like."""
    words = set(re.split(r"[\s_-]+", name.lower()))
    return next((specs for specs in DEVICE_SPECS.values() if specs.name.split("-")[0] in words), None)


def _links(matrix: Matrix | None) -> set[int]:
    """How many NVLinks pairs of GPUs have."""
    return set() if matrix is None else {matrix.nvlinks(a, b) for a, b in combinations(matrix.gpus, 2)}


def _device(names: Sequence[str], links: set[int]) -> tuple[DeviceSpecs | None, list[str]]:
    if names:
        specs = find_by_driver_name(names[0])
        if specs is not None:
            return specs, [f'device = "{specs.name}"']
        label = re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-")
        return None, [
            f'device = "{label}"',
            "# Its specs are not known. Fill in what its vendor says, less what never lasts (a half is usual):",
            '# flops = "... TFLOP/s"',
            '# latency = "10 us"',
            '# inter_latency = "20 us"',
        ]
    few = min(links, default=0)
    alike = [specs for specs in DEVICE_SPECS.values() if specs.name != "cpu" and specs.intra == (few or 1) * NVLINK]
    guess = alike[0] if alike else DEVICE_SPECS["l20-48g"]
    others = ", ".join(specs.name for specs in alike[1:])
    line = f'device = "{guess.name}"  # a guess from the links, which do not name it'
    return guess, [line + (f"; {others} have the same" if others else "")]


def _memory(device: Device, specs: DeviceSpecs | None) -> list[str]:
    memory = device.memory // MIB_PER_GIB
    return [] if specs is not None and abs(memory - specs.memory) <= 1 else [f'memory = "{memory} GiB"']


def _intra(matrix: Matrix | None, links: set[int], specs: DeviceSpecs | None) -> list[str]:
    pcie = DEVICE_SPECS["l20-48g"]
    if matrix is None:
        return ["# How GPUs and NICs are joined is not known: `nvidia-smi topo -m` says it."]
    if not links:
        return [] if specs is not None else [f'intra = "{pcie.intra} GB/s"  # there is one GPU']
    few = min(links)
    if few:
        speed = few * NVLINK
        line = f'intra = "{speed} GB/s"  # {few} NVLinks between every two GPUs, {NVLINK} GB/s each'
        return [line] if specs is None or specs.intra != speed else [f"# NVLink: {few} between every two GPUs."]
    notes = [f"# PCIe: {_pairs(matrix)}. Which generation is not known; 4.0 x16 is assumed."]
    if max(links):
        pairs = ", ".join(f"{a}-{b}" for a, b in combinations(matrix.gpus, 2) if matrix.nvlinks(a, b))
        notes.append(f"# NVLink only between {pairs}: groups of other GPUs go over PCIe, which counts here.")
    return [*notes, f'intra = "{pcie.intra} GB/s"', f'host = "{pcie.host} GB/s"  # shared by all GPUs of the node']


def _pairs(matrix: Matrix) -> str:
    kinds = [matrix.links[pair] for pair in combinations(matrix.gpus, 2)]
    return ", ".join(f"{kinds.count(kind)} pairs {kind}" for kind in dict.fromkeys(kinds))


def _network(matrix: Matrix | None, specs: DeviceSpecs | None) -> list[str]:
    speed = specs.inter if specs is not None else DEVICE_SPECS["l20-48g"].inter
    assumed = (
        f'inter = "{speed} GB/s"  # assumed: how fast a NIC is, the link matrix does not say (400 Gbit/s = 50 GB/s)'
    )
    if matrix is None:
        return [assumed]
    if not matrix.nics:
        return ["# No NIC was seen.", assumed]
    sets = [matrix.nearest_nics(gpu) for gpu in matrix.gpus]
    order = list(dict.fromkeys(sets))
    lines = [assumed]
    if len(order) <= len(LETTERS):
        lines.append(f'nics = "{"".join(LETTERS[order.index(nearest)] for nearest in sets)}"')
    for number, nics in enumerate(order[: len(LETTERS)]):
        shown = ", ".join(matrix.names.get(nic, nic) for nic in nics)
        users: dict[str, list[str]] = {}
        for gpu, nearest in zip(matrix.gpus, sets, strict=True):
            if nearest == nics:
                users.setdefault(matrix.links[gpu, nics[0]], []).append(gpu)
        near = "; ".join(f"{link} from {' '.join(gpus)}" for link, gpus in users.items())
        lines.append(f"#   {LETTERS[number]}: {shown} ({near})")
    used = {nic for nics in order for nic in nics}
    idle = [matrix.names.get(nic, nic) for nic in matrix.nics if nic not in used]
    if idle:
        lines.append(f"#   nearest to no GPU: {', '.join(idle)}")
    return lines


def _numa(matrix: Matrix | None) -> list[str]:
    if matrix is None or not matrix.numa:
        return []
    groups: dict[str, list[str]] = {}
    for gpu in matrix.gpus:
        groups.setdefault(matrix.numa.get(gpu, "?"), []).append(gpu)
    return ["# NUMA: " + "; ".join(f"{domain}: {' '.join(gpus)}" for domain, gpus in groups.items())]
