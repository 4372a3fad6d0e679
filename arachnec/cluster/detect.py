"""A cluster file from what a machine says about itself: devices, NVLink or PCIe, a NIC for each GPU, NUMA.

What the machine cannot say stands in the file as a comment, with what was assumed instead: how many such nodes there
are, and how fast the network between them is.

``nvidia-smi topo -m`` prints a square of GPUs and NICs. A cell is ``X`` (itself), ``NV18`` (eighteen NVLinks), or how
far apart two are on PCIe: ``PIX`` (one switch), ``PXB`` (several switches), ``PHB`` (a host bridge), ``NODE`` (the host
bridges of a NUMA node), ``SYS`` (between NUMA nodes); the legend stands below it. ``nvidia-smi
--query-gpu=index,name,memory.total --format=csv`` prints a line for each device.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from arachnec.cluster.device_selection import MASK
from arachnec.cluster.device_specs import DEVICE_SPECS, DeviceSpecs
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Span
from arachnec.solver.budget import usable_cores

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")  # from near to far
QUERY = "index,name,memory.total"
_CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")
_AFFINITIES = ("CPU Affinity", "GPU NUMA ID", "NUMA Affinity")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_DEVICE = re.compile(r"GPU\d+")
_MEMORY = re.compile(r"(\d+) MiB")


def bad_matrix_error(span: Span | None, problem: str) -> UserError:
    return user_error(
        f"the link matrix is damaged: {problem}",
        label=problem,
        help="save what `nvidia-smi topo -m` prints again, all of it",
        span=span,
    )


def bad_devices_error(span: Span | None, problem: str) -> UserError:
    return user_error(
        f"the list of devices is damaged: {problem}",
        label=problem,
        help="save what `nvidia-smi --query-gpu=index,name,memory.total --format=csv` prints again",
        span=span,
    )


@dataclass(frozen=True)
class Device:
    name: str  # as the driver calls it: ``NVIDIA H100 80GB HBM3``
    memory: int  # MiB


@dataclass(frozen=True)
class Matrix:
    """How every GPU is joined to every GPU and NIC: ``links["GPU0", "NIC3"] == "PXB"``."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    links: dict[tuple[str, str], str]
    numa: dict[str, str]  # of each GPU, where the matrix says it
    names: dict[str, str]  # of NICs: ``NIC0`` is ``mlx5_0``

    def nearest_nics(self, gpu: str) -> tuple[str, ...]:
        """The NICs that no other is nearer to this GPU than."""
        far = {nic: DISTANCES.index(self.links[gpu, nic]) for nic in self.nics}
        return tuple(nic for nic in self.nics if far[nic] == min(far.values()))

    def nvlinks(self, gpu: str, peer: str) -> int:
        """How many NVLinks join two GPUs; 0 where they talk over PCIe."""
        link = self.links[gpu, peer]
        return int(link[2:]) if link.startswith("NV") else 0


def parse_matrix(text: str, file: str) -> Matrix:
    """Raises UserError with one diagnostic where the text is no ``nvidia-smi topo -m``."""
    rows = [_ESCAPE.sub("", row) for row in text.splitlines()]
    top = next((number for number, row in enumerate(rows) if _is_header(row)), None)
    if top is None:
        raise user_error(
            "this is neither a link matrix nor a list of devices",
            label="expected `GPU0 ...`, or `index, name, memory.total [MiB]`",
            help=(
                "save what `nvidia-smi topo -m` or `nvidia-smi --query-gpu=index,name,memory.total --format=csv` "
                "prints, all of it"
            ),
            span=_span(file, 1, rows[0] if rows else ""),
        )
    header = rows[top]
    for words in _AFFINITIES:
        header = header.replace(words, "")
    columns = header.split()
    gpus = tuple(name for name in columns if _DEVICE.fullmatch(name))
    nics = tuple(name for name in columns if name not in gpus)
    links: dict[tuple[str, str], str] = {}
    numa: dict[str, str] = {}
    for number, row in enumerate(rows[top + 1 :], top + 2):
        name, *cells = row.split() or [""]
        if name not in columns:
            break
        for peer, cell in zip(columns, cells, strict=False):
            if not _CELL.fullmatch(cell) or (cell == "X") != (name == peer):
                raise bad_matrix_error(_span(file, number, row), f"`{cell}` between {name} and {peer}")
            links[name, peer] = cell
        if len(cells) < len(columns):
            problem = f"{name} has {len(cells)} of {len(columns)} cells"
            raise bad_matrix_error(_span(file, number, row), problem)
        affinities = cells[len(columns) :]
        if name in gpus and len(affinities) > 1 and affinities[1].isdigit():
            numa[name] = affinities[1]
    missing = [name for name in columns if (name, name) not in links]
    if missing:
        raise bad_matrix_error(_span(file, top + 1, rows[top]), f"there is no row for {missing[0]}")
    uneven = [(a, b) for a, b in links if links[a, b] != links[b, a]]
    if uneven:
        gpu, peer = uneven[0]
        problem = f"{gpu} to {peer} is {links[gpu, peer]}, and {links[peer, gpu]} the other way"
        raise bad_matrix_error(_span(file, top + 1, rows[top]), problem)
    names = dict(re.findall(r"^\s*(NIC\d+): *(\S+)", text, re.MULTILINE))
    return Matrix(gpus, nics, links, numa, names)


def _is_header(row: str) -> bool:
    words = row.split()
    return bool(words) and words[0] == "GPU0" and not (len(words) > 1 and words[1] == "X")


def is_device_list(text: str) -> bool:
    return "memory.total" in text.split("\n", 1)[0]


def parse_devices(text: str, file: str) -> tuple[Device, ...]:
    """Raises UserError with one diagnostic where the text is not what the query prints."""
    rows = text.splitlines()
    names = [cell.strip() for cell in rows[0].split(",")]
    column_of = {
        word: next((i for i, name in enumerate(names) if name.split(" ")[0] == word), None) for word in _COLUMNS
    }
    for word, column in column_of.items():
        if column is None:
            raise bad_devices_error(_span(file, 1, rows[0]), f"it has no column `{word}`")
    name_at, memory_at = (column for column in column_of.values() if column is not None)
    devices = []
    for number, cells in enumerate(csv.reader(rows[1:], skipinitialspace=True), 2):
        if not cells:
            continue
        if len(cells) != len(names):
            problem = f"{len(cells)} values for {len(names)} columns"
            raise bad_devices_error(_span(file, number, rows[number - 1]), problem)
        memory = _MEMORY.fullmatch(cells[memory_at].strip())
        if memory is None:
            problem = f"`{cells[memory_at]}` is no memory in MiB"
            raise bad_devices_error(_span(file, number, rows[number - 1]), problem)
        devices.append(Device(cells[name_at].strip(), int(memory[1])))
    if not devices:
        raise bad_devices_error(_span(file, 1, rows[0]), "it lists none")
    return tuple(devices)


_COLUMNS = ("name", "memory.total")


def _span(file: str, line: int, row: str) -> Span:
    return Span(file, line, 1, line, max(2, len(row) + 1))


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


TIMEOUT = 60  # s: a driver that hangs must not take the command with it


def detected(tell: Callable[[str], None] = lambda note: None) -> str:
    """The text of a cluster file for this machine; ``tell`` is told where it has no GPU.

    Raises UserError where what its tools print is not understood, or its devices differ.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    devices = _by_nvml()
    if devices is None:
        listed = _output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")
        devices = parse_devices(listed, "nvidia-smi --query-gpu") if listed else ()
    shown = shown_devices(os.environ, len(devices))
    devices = tuple(devices[index] for index in shown)
    if not devices:
        tell("no GPU was found on this machine; the file describes its processor")
        return cpu_file(usable_cores(), memory)
    text = _output_of("nvidia-smi", "topo", "-m")
    matrix = parse_matrix(text, "nvidia-smi topo -m") if text else None
    if matrix is not None and shown and max(shown) < len(matrix.gpus):
        matrix = replace(matrix, gpus=tuple(matrix.gpus[index] for index in shown))
    return cluster_file(matrix, devices, memory)


def shown_devices(environment: Mapping[str, str], count: int) -> list[int]:
    """Which of so many devices CUDA_VISIBLE_DEVICES shows: all where it is not set, names them otherwise than by
    number, or stands in a rank's environment, where it may show that rank's device alone."""
    mask = environment.get(MASK)
    if mask is None or "RANK" in environment:
        return list(range(count))
    words = [word.strip() for word in mask.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        return list(range(count))
    return [int(word) for word in words if int(word) < count]


def _by_nvml() -> tuple[Device, ...] | None:
    """The devices by the driver's library, where its Python package is there and it answers; else None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Device(_text(pynvml.nvmlDeviceGetName(handle)), pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20)
            for handle in handles
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older packages give bytes


def _output_of(*words: str) -> str | None:
    """What a program prints; None where it is not there or fails."""
    try:
        completed = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout if completed.returncode == 0 else None
