"""What NVIDIA's tools print about one machine, as data: the link matrix, and the list of devices.

``nvidia-smi topo -m`` prints a square of GPUs and NICs. A cell is ``X`` (itself), ``NV18`` (eighteen NVLinks), or how
far apart two are on PCIe: ``PIX`` (one switch), ``PXB`` (several switches), ``PHB`` (a host bridge), ``NODE`` (the host
bridges of a NUMA node), ``SYS`` (between NUMA nodes); the legend stands below it. ``nvidia-smi
--query-gpu=index,name,memory.total --format=csv`` prints a line for each device.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Span

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
