"""A cluster from a TOML file or its short form: ``2x8:h100-80g`` is two nodes of eight, ``4:cpu`` one node of four.

A file states what differs from the device's specs, every quantity with its unit::

    nodes = 2
    gpus = 8
    device = "h100-80g"
    inter = "25 GB/s"
    nics = "AABBCCDD"

Nodes may stand in racks: ``rack`` nodes each, which share ``uplink`` to the other racks. Nodes with other devices
are groups, ``[[group]]`` with ``nodes``, ``device``, and ``memory``, ``flops`` or ``intra`` where they differ from its
device specs; ``2x8:h100-80g+2x8:a100-80g`` is the short form.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arachnec.cluster.device_specs import ALIASES, DEVICE_SPECS, PCIE4, DeviceSpecs, find_device_specs
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.limits import LARGEST, LARGEST_SETTINGS, MOST_GPUS, SMALLEST
from arachnec.ir.nodes import Cluster, Span
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.solver.budget import usable_cores

AUTO = "auto"  # this machine, as `arachnec cluster detect` describes it


def no_gpus_error(span: Span | None, nodes: int, gpus: int) -> UserError:
    return user_error(
        f"the cluster has no GPUs: {nodes} nodes of {gpus}",
        label="must be at least 1",
        help="give at least one node with at least one device",
        span=span,
    )


def missing_cluster_key_error(span: Span | None, key: str, example: str) -> UserError:
    return user_error(f"the cluster file has no `{key}`", help=f"add `{example}`", span=span)


def bad_toml_error(span: Span | None, reason: str) -> UserError:
    return user_error(
        f"the cluster file is not TOML: {reason}",
        help="text values stand in quotes, one `key = value` a line",
        span=span,
    )


_UNITS = {
    "memory": "GiB",
    "flops": "TFLOP/s",
    "intra": "GB/s",
    "inter": "GB/s",
    "latency": "us",
    "inter_latency": "us",
    "uplink": "GB/s",
    "host": "GB/s",
    "host_link": "GB/s",
    "host_memory": "GiB",
    "pcie": "GB/s",
}
_REQUIRED = ("memory", "flops", "intra", "inter", "latency", "inter_latency")  # where the device is unknown
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
    "host": 'host = "25 GB/s"',
    "host_link": 'host_link = "3 GB/s"',
    "host_memory": 'host_memory = "512 GiB"',
    "pcie": 'pcie = "25 GB/s"',
    "group": '[[group]]\\nnodes = 2\\ndevice = "a100-80g"',
}
_OF_A_GROUP = ("nodes", "device", "memory", "flops", "intra")
_SHORT = re.compile(r"(?:(?P<nodes>\d{1,18})x)?(?P<gpus>\d{1,18}):(?P<device>[A-Za-z0-9_.+-]+)")
_GROUP = re.compile(r"\s*\[\[\s*group\s*\]\]")
_QUANTITY = re.compile(r"\s*(?P<number>[0-9.]+(?:[eE][+-]?\d+)?)\s*(?P<unit>[A-Za-z/]+)\s*")


def parse_cluster(text_or_path: str | Path, *, name: str = "cluster") -> Cluster:
    """The cluster that a short form or a TOML file describes; ``auto`` is the machine at hand.

    Raises UserError with one diagnostic where it describes none.
    """
    shorts = [_SHORT.fullmatch(part.strip()) for part in str(text_or_path).split("+")]
    groups = [
        {"nodes": int(short["nodes"] or 1), "gpus": int(short["gpus"]), "device": short["device"]}
        for short in shorts
        if short
    ]
    if len(groups) == len(shorts):
        return _of_short_forms(groups, name)
    if str(text_or_path) == AUTO:
        from arachnec.cluster.detect import detected

        return _of_toml(detected(), AUTO, name)
    path = Path(text_or_path)
    if not path.is_file():
        raise user_error(
            f"`{text_or_path}` is neither a cluster file nor a short form",
            help="write NODESxGPUS:DEVICE, as in `2x8:h100-80g` or `4:cpu`, the path of a TOML file, or `auto`",
        )
    if path.stat().st_size > LARGEST_SETTINGS:
        raise bad_toml_error(Span(str(path), 1, 1, 1, 2), f"larger than {LARGEST_SETTINGS >> 20} MiB")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise bad_toml_error(Span(str(path), 1, 1, 1, 2), "it is no UTF-8 text") from None
    return _of_toml(text, str(path), name)


def _of_toml(text: str, path: str, name: str) -> Cluster:
    """The cluster of a file's text; ``path`` is where mistakes in it are."""
    try:
        values = dict(tomllib.loads(text))
    except RecursionError:
        raise bad_toml_error(Span(path, 1, 1, 1, 2), "it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        position = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(position[1]), int(position[2])) if position else (1, 1)
        raise bad_toml_error(Span(path, line, column, line, column + 1), str(error)) from error
    except ValueError:
        raise bad_toml_error(Span(path, 1, 1, 1, 2), "it has a number of thousands of digits") from None
    return _cluster(values, name, Lines(path, text))


def _of_short_forms(parts: list[dict[str, object]], name: str) -> Cluster:
    lines = Lines(None, "")
    if len(parts) == 1:
        return _cluster(parts[0] | _own_cores(parts[0]), name, lines)
    if len({part["gpus"] for part in parts}) > 1:
        raise user_error(
            "the nodes of the cluster have different numbers of GPUs",
            help="give all nodes as many, as in `2x8:h100-80g+2x8:a100-80g`",
        )
    groups = [{"nodes": part["nodes"], "device": part["device"]} for part in parts]
    return _cluster({"gpus": parts[0]["gpus"], "group": groups}, name, lines)


def _own_cores(values: dict[str, object]) -> dict[str, object]:
    """CPU ranks of a short form are processes of this machine; where they outnumber its cores, they share them."""
    cores = usable_cores()
    device, gpus = values["device"], values["gpus"]
    return {"cores": cores} if device == "cpu" and isinstance(gpus, int) and gpus > cores else {}


@dataclass(frozen=True)
class Lines:
    """Where a key of a TOML file stands, or the head of a table; tomllib keeps no positions.

    Keys of one group are looked for from its head on, line ``first``.
    """

    file: str | None
    text: str
    first: int = 1

    def span(self, key: str) -> Span | None:
        if self.file is None:
            return None
        for number, row in enumerate(self.text.splitlines()[self.first - 1 :], self.first):
            match = re.match(rf"\s*(?:\[\[?\s*)?({re.escape(key)})\b", row)
            if match:
                return Span(self.file, number, match.start(1) + 1, number, match.end(1) + 1)
        return Span(self.file, self.first, 1, self.first, 2)

    def of_groups(self, count: int) -> Sequence[Lines]:
        """One for each ``[[group]]``; all of the file where they are written otherwise."""
        heads = [number for number, row in enumerate(self.text.splitlines(), 1) if _GROUP.match(row)]
        return [replace(self, first=head) for head in heads] if len(heads) == count else [self] * count


def _cluster(values: dict[str, object], name: str, lines: Lines) -> Cluster:
    _check_keys(values, tuple(_EXAMPLES), lines)
    if "group" in values:
        return _mixed(values, name, lines)
    nodes = _count(values, "nodes", 1, lines)
    gpus = _gpus(values, nodes, lines)
    specs, device = _device(values, lines)
    quantities = {key: _quantity(values, key, specs, lines) for key in _REQUIRED}
    return _build(values, name, lines, nodes, gpus, device, quantities, specs)


def _mixed(values: dict[str, object], name: str, lines: Lines) -> Cluster:
    """The groups one after the other; the links between nodes are those of the group whose are slowest."""
    rows = values["group"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise _bad("group", "no list of tables", "tables `[[group]]`", lines)
    if "host" in values:
        raise _bad("host", values["host"], "left out, since the nodes differ: their specs say it", lines)
    for key in _OF_A_GROUP:
        if key in values:
            raise _bad(key, values[key], "in each `[[group]]`, since the nodes differ", lines)
    counts, devices, specs_of_groups = [], [], []
    shared = {key: values[key] for key in ("inter", "latency", "inter_latency") if key in values}
    for row, of_group in zip(rows, lines.of_groups(len(rows)), strict=True):
        _check_keys(row, _OF_A_GROUP, of_group)
        specs, device = _device(row | shared, of_group)
        counts.append(_count(row, "nodes", 1, of_group))
        if counts[-1] < 1:
            raise no_gpus_error(of_group.span("nodes"), counts[-1], _count(values, "gpus", None, lines))
        specs_of_groups.append(specs)
        places = {key: lines if key in shared else of_group for key in _REQUIRED}
        devices.append((device, {key: _quantity(row | shared, key, specs, at) for key, at in places.items()}))
    nodes = sum(counts)
    gpus = _gpus(values, nodes, lines)
    worst: dict[str, Quantity] = {}
    for key in _REQUIRED:
        pick = max if key in ("flops", "latency", "inter_latency") else min
        worst[key] = pick((quantities[key] for _, quantities in devices), key=lambda entry: entry.value)
    fastest = max(devices, key=lambda entry: entry[1]["flops"].value)[0]
    mixed = tuple(
        (count, device, quantities["memory"], quantities["flops"], quantities["intra"])
        for count, (device, quantities) in zip(counts, devices, strict=True)
    )
    known = [specs for specs in specs_of_groups if specs is not None]
    if "pcie" not in values and "host_memory" in values:
        values = values | {"pcie": f"{min((specs.pcie for specs in known), default=PCIE4)} GB/s"}
    with_nics = next((specs for specs in specs_of_groups if specs is not None and specs.nics), None)
    return _build(values, name, lines, nodes, gpus, fastest, worst, with_nics, mixed)


def _build(
    values: dict[str, object],
    name: str,
    lines: Lines,
    nodes: int,
    gpus: int,
    device: str,
    quantities: dict[str, Quantity],
    specs: DeviceSpecs | None,
    mixed: Value | None = None,
) -> Cluster:
    for key, other in (("rack", "uplink"), ("uplink", "rack")):
        if key in values and other not in values:
            raise missing_cluster_key_error(lines.span(key), other, _EXAMPLES[other])
    rack = _count(values, "rack", nodes, lines)
    if not 1 <= rack <= LARGEST:
        raise _bad("rack", rack, f"nodes: 1 to {LARGEST:g}", lines)
    cores = _count(values, "cores", 0, lines)
    if not 0 <= cores <= LARGEST:
        raise _bad("cores", cores, f"a whole number from 0 to {LARGEST:g}", lines)
    attrs: dict[str, Value | None] = {
        "nodes": nodes,
        "gpus": gpus,
        "device": device,
        **quantities,
        "nics": _nics(values, gpus, specs, lines),
        "cores": cores or None,
        "host": _host(values, specs, lines) if mixed is None else None,
        "host_link": _quantity(values, "host_link", None, lines) if "host_link" in values else None,
        "host_memory": _quantity(values, "host_memory", None, lines) if "host_memory" in values else None,
        "pcie": _pcie(values, specs, lines),
        "rack": rack if "rack" in values else None,
        "uplink": _quantity(values, "uplink", None, lines) if "uplink" in values else None,
        "mixed": mixed,
    }
    return Cluster(_text(values, "name", lines) or name, Attributes.of(**attrs))


def _check_keys(values: dict[str, object], known: tuple[str, ...], lines: Lines) -> None:
    for key in values:
        if key not in known:
            raise user_error(
                f"unknown key `{key}` in the cluster file",
                label="no such key",
                help=f"did you mean `{_nearest(key, list(known))}`? A cluster file has {', '.join(known)}",
                span=lines.span(key),
            )


def _gpus(values: dict[str, object], nodes: int, lines: Lines) -> int:
    gpus = _count(values, "gpus", None, lines)
    if nodes < 1 or gpus < 1:
        raise no_gpus_error(lines.span("nodes" if nodes < 1 else "gpus"), nodes, gpus)
    if nodes * gpus > MOST_GPUS:
        raise user_error(
            f"the cluster has {nodes} nodes of {gpus}, more than {MOST_GPUS} GPUs",
            label="more than is planned for",
            help="write NODESxGPUS:DEVICE, as in `2x8:h100-80g`",
            span=lines.span("nodes" if nodes > gpus else "gpus"),
        )
    return gpus


def _device(values: dict[str, object], lines: Lines) -> tuple[DeviceSpecs | None, str]:
    """The specs and the full name of the device; no specs where the file says all that they would."""
    device = _text(values, "device", lines)
    if device is None:
        raise missing_cluster_key_error(lines.span(""), "device", _EXAMPLES["device"])
    specs = find_device_specs(device)
    if specs is None and not all(key in values for key in _REQUIRED):
        names = sorted(DEVICE_SPECS)
        near = difflib.get_close_matches(device.lower(), [*names, *ALIASES], 1, 0.0)[0]
        first = ALIASES.get(near, near)
        listed = ", ".join(sorted(names, key=lambda name: name != first))
        raise user_error(
            f"unknown device `{device}`",
            label="no device of that name is known",
            help=(
                f"did you mean `{near}`? Known are {listed}; a file may describe any other device by memory, flops, "
                "intra, inter, latency and inter_latency"
            ),
            span=lines.span("device"),
        )
    return specs, specs.name if specs else device


def _host(values: dict[str, object], specs: DeviceSpecs | None, lines: Lines) -> Quantity | None:
    if "host" not in values and (specs is None or math.isinf(specs.host)):
        return None
    return _quantity(values, "host", specs, lines)


def _pcie(values: dict[str, object], specs: DeviceSpecs | None, lines: Lines) -> Quantity | None:
    """Of no use where nothing lies in host memory; PCIe 4.0 x16 where neither file nor specs say it."""
    if "pcie" in values:
        return _quantity(values, "pcie", None, lines)
    if "host_memory" not in values:
        return None
    return Quantity(float(PCIE4 if specs is None else specs.pcie), "GB/s")


def _nics(values: dict[str, object], gpus: int, specs: DeviceSpecs | None, lines: Lines) -> str | None:
    nics = _text(values, "nics", lines)
    if nics is not None and len(nics) != gpus:
        example = f'nics = "{"AABBCCDD"[:gpus] if gpus <= 8 else "A" * gpus}"'
        expected = f"one letter for each of the {gpus} devices of a node"
        raise _bad("nics", nics, expected, lines, example)
    if nics is None and specs is not None and specs.nics is not None and len(specs.nics) == gpus:
        return specs.nics
    return nics


def _count(values: dict[str, object], key: str, default: int | None, lines: Lines) -> int:
    if key not in values:
        if default is None:
            raise missing_cluster_key_error(lines.span(""), key, _EXAMPLES[key])
        return default
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(key, value, "a whole number", lines)
    return value


def _text(values: dict[str, object], key: str, lines: Lines) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise _bad(key, value, "text in quotes", lines)
    return value


def _quantity(values: dict[str, object], key: str, specs: DeviceSpecs | None, lines: Lines) -> Quantity:
    unit = _UNITS[key]
    if key not in values:
        assert specs is not None, "without device specs every quantity is in the file"
        number = specs.sustained if key == "flops" else getattr(specs, key)
        return Quantity(round(float(number), 6), unit)
    value = values[key]
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    try:
        number = float(match["number"]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or match["unit"] != unit or number <= 0:
        raise _bad(key, value, f"a positive number of {unit}, with its unit", lines)
    if not SMALLEST <= number <= LARGEST:
        raise _bad(key, value, f"{SMALLEST:g} to {LARGEST:g} {unit}", lines)
    return Quantity(number, unit)


def _bad(key: str, value: object, expected: str, lines: Lines, example: str | None = None) -> UserError:
    shown = f'"{value}"' if isinstance(value, str) else str(value)
    return user_error(
        f"`{key}` of the cluster is {shown}, expected {expected}",
        label=f"expected {expected}",
        help=f"write for example `{example or _EXAMPLES[key]}`",
        span=lines.span(key),
    )


def _nearest(word: str, known: list[str]) -> str:
    return difflib.get_close_matches(word, known, 1, 0.0)[0]
