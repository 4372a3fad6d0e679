"""Tasks whose durations somebody measured, as a module that the schedulers take.

::

    {"unit": "ms", "tasks": [{"name": "D_97", "stages": [{"stage": "vae", "ms": {"1": 41200, "2": 25100}},
                                                         {"stage": "dit", "ms": {"1": 29840}}]}]}

The stages of a task follow one another. The degrees listed are the legal ones; ``unit`` is ``ms`` or ``s``, by default
the key of the times. Schedules count in microseconds, and a stage that took 0 counts as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from arachnec.ir.diagnostic import UserError, close_to, user_error
from arachnec.ir.limits import LARGEST, LARGEST_DATA
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Phase, Span, Stage
from arachnec.ir.stage_sizes import times_of
from arachnec.ir.values import Attributes, Quantity

UNITS = {"ms": 1.0, "s": 1e3}
EXAMPLE = '{"unit": "ms", "tasks": [{"name": "a", "stages": [{"stage": "dit", "ms": {"1": 100, "2": 55}}]}]}'


def not_json_error(span: Span | None, reason: str) -> UserError:
    return user_error(f"the table is not JSON: {reason}", label="here", help=f"a table looks like {EXAMPLE}", span=span)


@dataclass(frozen=True)
class Table:
    """A module at level costed, and for each cascade's name the name of its task."""

    module: Module
    tasks: dict[str, str]


def read_table(path: str | Path, cluster: Cluster) -> Table:
    """The cascades of a table on a cluster. Raises UserError with one diagnostic for a malformed table."""
    file = Path(path)
    if not file.is_file():
        raise user_error(f"there is no file `{path}`", help=f"give a JSON file such as {EXAMPLE}")
    if file.stat().st_size > LARGEST_DATA:
        raise not_json_error(None, f"it is larger than {LARGEST_DATA >> 20} MiB")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_json_error(None, f"byte {error.start} is no UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=partial(_once, file, text))
    except json.JSONDecodeError as error:
        span = Span(str(path), error.lineno, error.colno, error.lineno, error.colno + 1)
        raise not_json_error(span, error.msg) from error
    except ValueError:
        raise not_json_error(None, "it has a number of thousands of digits") from None
    except RecursionError:
        raise not_json_error(None, "it is nested too deeply") from None
    return _Reader(str(path), text).table(value, cluster)


def _once(file: Path, text: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the table; Python would keep the last of two values of one key and say nothing."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise user_error(
                f"`{key}` is given twice in one object",
                label="the second one",
                help="keep one of them",
                span=_second(str(file), text, key),
            )
        values[key] = value
    return values


def _second(file: str, text: str, key: str) -> Span:
    """Where an object without objects in it has the key for the second time; the first line where none has."""
    for inner in re.finditer(r"\{[^{}]*\}", text):
        places = list(re.finditer(rf'"{re.escape(key)}"(?=\s*:)', inner[0]))
        if len(places) > 1:
            at = inner.start() + places[1].start()
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            return Span(file, line, column, line, column + len(places[1][0]))
    return Span(file, 1, 1, 1, 2)


# Text that says something, and has no half of a surrogate pair, as JSON's escapes can.
_TEXT = r"\A[^\ud800-\udfff]+\Z"
_Text = Annotated[str, msgspec.Meta(pattern=_TEXT)]
_Read = TypeVar("_Read", bound=msgspec.Struct)


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    unit: Literal["ms", "s"] | None = None
    tasks: list[Any]


class _Task(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: _Text | msgspec.UnsetType = msgspec.UNSET
    stages: Annotated[list[Any], msgspec.Meta(min_length=1)]


class _Stage(msgspec.Struct, forbid_unknown_fields=True):
    stage: _Text
    ms: Any = msgspec.UNSET
    s: Any = msgspec.UNSET


EXPECTED = {
    "unit": "ms or s",
    "tasks": "a list of tasks",
    "name": "text that UTF-8 can hold",
    "stages": "a list of at least one stage",
    "stage": "the stage's name",
}


@dataclass(frozen=True)
class _Reader:
    file: str
    text: str

    def table(self, value: Any, cluster: Cluster) -> Table:
        top = self._read(_File, value, "the table", "")
        if not top.tasks:
            raise user_error("the table has no tasks", help=f"a table looks like {EXAMPLE}", span=self._span("tasks"))
        cascades: list[Cascade] = []
        names: dict[str, str] = {}
        last: set[str] = set()
        order: dict[str, None] = {}
        for number, entry in enumerate(top.tasks):
            chain = self._task(entry, number, top.unit, names)
            cascades += chain
            last.add(chain[-1].stage)
            order |= dict.fromkeys(cascade.stage for cascade in chain)
        total = sum(max(times_of(cascade).values()) for cascade in cascades)
        if total > LARGEST:  # a plan may be as long
            raise self._bad("the sum of all tasks' longest times", total, f"{LARGEST:g} ms at most", "tasks")
        stages = tuple(Stage(name, name in last, Attributes.of(costs="table")) for name in order)
        return Table(Module("plan", Level.COSTED, cluster, stages=stages, cascades=tuple(cascades)), names)

    def _task(self, value: Any, number: int, unit: str | None, names: dict[str, str]) -> list[Cascade]:
        name = value.get("name", str(number)) if isinstance(value, dict) else ""
        named = isinstance(name, str) and re.search(_TEXT, name)
        where, near = (f"task `{name}`", name) if named else (f"task {number}", "")
        task = self._read(_Task, value, f"task {number}", f" of {where}", near)
        cascades: list[Cascade] = []
        for index, entry in enumerate(task.stages):
            stage = self._read(_Stage, entry, f"a stage of {where}", f" of {where}", name)
            times = self._times(stage, f"stage `{stage.stage}` of {where}", unit, name)
            label = _unique(f"{name}.{stage.stage}", names)
            names[label] = name
            cascades.append(
                Cascade(
                    name=label,
                    phase=Phase.TRAIN if index == len(task.stages) - 1 else Phase.ENCODE,
                    stage=stage.stage,
                    clips=(),
                    batch=1,
                    tokens=0,
                    text=0,
                    inputs=(cascades[-1].name,) if cascades else (),
                    attrs=Attributes.of(times=times),
                )
            )
        return cascades

    def _times(self, stage: _Stage, where: str, unit: str | None, near: str) -> tuple[tuple[int, Quantity], ...]:
        given = {key: times for key, times in (("ms", stage.ms), ("s", stage.s)) if times is not msgspec.UNSET}
        if len(given) != 1:
            raise self._bad(f"{where}", "without times" if not given else "given twice", f"one `{unit or 'ms'}`", near)
        ((key, times),) = given.items()
        if unit == "ms" and key == "s":
            raise self._bad(f"`unit` beside the `s` of {where}", unit, "s, or `ms` in its place", near)
        scale = UNITS[unit or key]
        if not isinstance(times, dict) or not times:
            raise self._bad(f"`{key}` of {where}", times, "an object from degree to time", near)
        pairs = []
        for degree, time in times.items():
            if not re.fullmatch(r"[1-9][0-9]{0,8}", degree):
                raise self._bad(f"a degree of {where}", degree, "a whole number from 1", degree)
            if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < LARGEST / scale:
                expected = f"a number from 0, less than {LARGEST / scale:g}"
                raise self._bad(f"the time of {where} at degree {degree}", time, expected, near)
            pairs.append((int(degree), Quantity(float(time) * scale, "ms")))
        return tuple(sorted(pairs, key=lambda pair: pair[0]))

    def _read(self, kind: type[_Read], value: Any, where: str, of: str, near: str = "") -> _Read:
        """An object of the table, without what is in it; ``of`` follows the name of a wrong key."""
        if not isinstance(value, dict):
            raise self._bad(where, value, "an object", near)
        try:
            return msgspec.convert(value, kind)
        except UnicodeEncodeError as error:  # half of a surrogate pair, in the place of a list or in a key
            key = next((key for key in value if value[key] == error.object), error.object)
        except msgspec.ValidationError as error:
            said = str(error)
            key = said.partition(" field `")[2][:-1] if said.startswith("Object ") else said.rpartition("$.")[2][:-1]
        if key in (known := kind.__struct_fields__):
            raise self._bad(f"`{key}`{of}", value.get(key), EXPECTED[key], near or key)
        raise user_error(
            f"unknown key `{key}` in {where}",
            label="no such key",
            help=f"did you mean `{close_to(key, known, 0.0)[0]}`? Known are {', '.join(known)}",
            span=self._span(key),
        )

    def _bad(self, where: str, value: Any, expected: str, near: str) -> UserError:
        shown = "missing" if value is None else json.dumps(value) if not isinstance(value, str) else value
        shown = shown[:80].encode(errors="replace").decode()
        return user_error(
            f"{where} is {shown}, expected {expected}",
            label=f"expected {expected}",
            help=f"a table looks like {EXAMPLE}",
            span=self._span(near),
        )

    def _span(self, word: str) -> Span:
        """Where a key or name first stands in the text; the first line where it does not."""
        for number, row in enumerate(self.text.splitlines(), 1):
            column = row.find(f'"{word}"')
            if word and column >= 0:
                return Span(self.file, number, column + 1, number, column + len(word) + 3)
        return Span(self.file, 1, 1, 1, 2)


def _unique(name: str, taken: Mapping[str, str]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"
