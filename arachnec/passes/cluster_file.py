"""A cluster from a TOML file or its short form: ``2x8:h100-80g`` is two nodes of eight, ``4:cpu`` one node of four.

A file states what differs from the device's data sheet, every quantity with its unit::

    nodes = 2
    gpus = 8
    device = "h100-80g"
    inter = "25 GB/s"
    nics = "AABBCCDD"

Nodes may stand in racks: ``rack`` nodes each, which share ``uplink`` to the other racks.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Cluster, Span
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.passes.data_sheets import ALIASES, DATA_SHEETS, DataSheet, find_data_sheet

MOST_GPUS = 2**17  # a slip of the hand must not fill the memory with ranks


@dataclass(frozen=True)
class ClusterNotFound(Diagnostic):
    title: ClassVar[str] = "`{given}` is neither a cluster file nor a short form"
    help: ClassVar[str] = "write NODESxGPUS:DEVICE, as in `2x8:h100-80g` or `4:cpu`, or the path of a TOML file"
    given: str


@dataclass(frozen=True)
class UnknownDevice(Diagnostic):
    title: ClassVar[str] = "unknown device `{device}`"
    label: ClassVar[str] = "no data sheet of that name"
    help: ClassVar[str] = (
        "did you mean `{suggestion}`? Known are {known}; "
        "a file may describe any other device by memory, flops, intra, inter, latency and inter_latency"
    )
    device: str
    suggestion: str
    known: str


@dataclass(frozen=True)
class NoGpus(Diagnostic):
    title: ClassVar[str] = "the cluster has no GPUs: {nodes} nodes of {gpus}"
    label: ClassVar[str] = "must be at least 1"
    help: ClassVar[str] = "give at least one node with at least one device"
    nodes: int
    gpus: int


@dataclass(frozen=True)
class TooManyGpus(Diagnostic):
    title: ClassVar[str] = "the cluster has {nodes} nodes of {gpus}, more than {most} GPUs"
    label: ClassVar[str] = "larger than any cluster there is"
    help: ClassVar[str] = "write NODESxGPUS:DEVICE, as in `2x8:h100-80g`"
    nodes: int
    gpus: int
    most: int = MOST_GPUS


@dataclass(frozen=True)
class UnknownClusterKey(Diagnostic):
    title: ClassVar[str] = "unknown key `{key}` in the cluster file"
    label: ClassVar[str] = "no such key"
    help: ClassVar[str] = "did you mean `{suggestion}`? A cluster file has {known}"
    key: str
    suggestion: str
    known: str


@dataclass(frozen=True)
class MissingClusterKey(Diagnostic):
    title: ClassVar[str] = "the cluster file has no `{key}`"
    help: ClassVar[str] = "add `{example}`"
    key: str
    example: str


@dataclass(frozen=True)
class BadClusterValue(Diagnostic):
    title: ClassVar[str] = "`{key}` of the cluster is {found}, expected {expected}"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "write for example `{example}`"
    key: str
    found: str
    expected: str
    example: str


@dataclass(frozen=True)
class BadToml(Diagnostic):
    title: ClassVar[str] = "the cluster file is not TOML: {reason}"
    help: ClassVar[str] = "text values stand in quotes, one `key = value` a line"
    reason: str


_UNITS = {
    "memory": "GiB",
    "flops": "TFLOP/s",
    "intra": "GB/s",
    "inter": "GB/s",
    "latency": "us",
    "inter_latency": "us",
    "uplink": "GB/s",
}
_REQUIRED = ("memory", "flops", "intra", "inter", "latency", "inter_latency")  # where there is no data sheet
_EXAMPLES = {
    "nodes": "nodes = 2",
    "gpus": "gpus = 8",
    "device": 'device = "h100-80g"',
    "name": 'name = "pod"',
    "memory": 'memory = "80 GiB"',
    "flops": 'flops = "400 TFLOP/s"',
    "intra": 'intra = "450 GB/s"',
    "inter": 'inter = "50 GB/s"',
    "latency": 'latency = "10 us"',
    "inter_latency": 'inter_latency = "20 us"',
    "nics": 'nics = "AABBCCDD"',
    "cores": "cores = 64",
    "rack": "rack = 4",
    "uplink": 'uplink = "100 GB/s"',
}
_SHORT = re.compile(r"(?:(?P<nodes>\d{1,18})x)?(?P<gpus>\d{1,18}):(?P<device>[A-Za-z0-9_.+-]+)")
_QUANTITY = re.compile(r"\s*(?P<number>[0-9.]+(?:[eE][+-]?\d+)?)\s*(?P<unit>[A-Za-z/]+)\s*")


def parse_cluster(text_or_path: str | Path, *, name: str = "cluster") -> Cluster:
    """The cluster that a short form or a TOML file describes.

    Raises UserError with one diagnostic where it describes none.
    """
    short = _SHORT.fullmatch(str(text_or_path).strip())
    if short:
        values: dict[str, object] = {
            "nodes": int(short["nodes"] or 1),
            "gpus": int(short["gpus"]),
            "device": short["device"],
        }
        return _cluster(values, name, Lines(None, ""))
    path = Path(text_or_path)
    if not path.is_file():
        raise UserError(ClusterNotFound(None, str(text_or_path)))
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(found[1]), int(found[2])) if found else (1, 1)
        raise UserError(BadToml(Span(str(path), line, column, line, column + 1), str(error))) from error
    return _cluster(values, name, Lines(str(path), text))


@dataclass(frozen=True)
class Lines:
    """Where a key of a TOML file stands; tomllib keeps no positions."""

    file: str | None
    text: str

    def span(self, key: str) -> Span | None:
        if self.file is None:
            return None
        for number, row in enumerate(self.text.splitlines(), 1):
            found = re.match(rf"\s*({re.escape(key)})\b", row)
            if found:
                return Span(self.file, number, found.start(1) + 1, number, found.end(1) + 1)
        return Span(self.file, 1, 1, 1, 2)


def _cluster(values: dict[str, object], name: str, lines: Lines) -> Cluster:
    for key in values:
        if key not in _EXAMPLES:
            raise UserError(
                UnknownClusterKey(lines.span(key), key, _nearest(key, list(_EXAMPLES)), ", ".join(_EXAMPLES))
            )
    nodes = _count(values, "nodes", 1, lines)
    gpus = _count(values, "gpus", None, lines)
    if nodes < 1 or gpus < 1:
        raise UserError(NoGpus(lines.span("nodes" if nodes < 1 else "gpus"), nodes, gpus))
    if nodes * gpus > MOST_GPUS:
        raise UserError(TooManyGpus(lines.span("nodes" if nodes > gpus else "gpus"), nodes, gpus))
    device = _text(values, "device", lines)
    if device is None:
        raise UserError(MissingClusterKey(lines.span(""), "device", _EXAMPLES["device"]))
    sheet = find_data_sheet(device)
    if sheet is None and not all(key in values for key in _REQUIRED):
        known = sorted(DATA_SHEETS)
        raise UserError(
            UnknownDevice(
                lines.span("device"), device, _nearest(device.lower(), known + list(ALIASES)), ", ".join(known)
            )
        )
    quantities = {key: _quantity(values, key, sheet, lines) for key in _REQUIRED}
    for key, other in (("rack", "uplink"), ("uplink", "rack")):
        if key in values and other not in values:
            raise UserError(MissingClusterKey(lines.span(key), other, _EXAMPLES[other]))
    rack = _count(values, "rack", nodes, lines)
    if rack < 1:
        raise UserError(_bad("rack", rack, "at least one node", lines))
    nics = _text(values, "nics", lines)
    if nics is not None and len(nics) != gpus:
        raise UserError(
            BadClusterValue(
                lines.span("nics"),
                "nics",
                f'"{nics}"',
                f"one letter for each of the {gpus} devices of a node",
                f'nics = "{"AABBCCDD"[:gpus] if gpus <= 8 else "A" * gpus}"',
            )
        )
    if nics is None and sheet is not None and sheet.nics is not None and len(sheet.nics) == gpus:
        nics = sheet.nics
    cores = _count(values, "cores", 0, lines)
    attrs: dict[str, Value | None] = {
        "nodes": nodes,
        "gpus": gpus,
        "device": sheet.name if sheet else device,
        **quantities,
        "nics": nics,
        "cores": cores or None,
        "rack": rack if "rack" in values else None,
        "uplink": _quantity(values, "uplink", None, lines) if "uplink" in values else None,
    }
    return Cluster(_text(values, "name", lines) or name, Attributes.of(**attrs))


def _count(values: dict[str, object], key: str, default: int | None, lines: Lines) -> int:
    if key not in values:
        if default is None:
            raise UserError(MissingClusterKey(lines.span(""), key, _EXAMPLES[key]))
        return default
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(_bad(key, value, "a whole number", lines))
    return value


def _text(values: dict[str, object], key: str, lines: Lines) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(_bad(key, value, "text in quotes", lines))
    return value


def _quantity(values: dict[str, object], key: str, sheet: DataSheet | None, lines: Lines) -> Quantity:
    unit = _UNITS[key]
    if key not in values:
        assert sheet is not None, "without a data sheet every quantity is in the file"
        number = sheet.sustained if key == "flops" else getattr(sheet, key)
        return Quantity(round(float(number), 6), unit)
    value = values[key]
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    try:
        number = float(found["number"]) if found else 0.0
    except ValueError:
        number = 0.0
    if found is None or found["unit"] != unit or number <= 0:
        raise UserError(_bad(key, value, f"a positive number of {unit}, with its unit", lines))
    return Quantity(number, unit)


def _bad(key: str, value: object, expected: str, lines: Lines) -> BadClusterValue:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return BadClusterValue(lines.span(key), key, shown, expected, _EXAMPLES[key])


def _nearest(word: str, known: list[str]) -> str:
    return difflib.get_close_matches(word, known, 1, 0.0)[0]
