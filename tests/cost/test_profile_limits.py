"""What no measurement can have come to is refused when a profile is read, and what is just possible is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arachnec.cost import profile
from arachnec.cost.profile import read_profile, write_profile
from arachnec.cost.sparse_profile import AttentionTime, fit_sparse
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Span

TINY = 1e-300
SLOW = 1e-9  # GB/s, the least that a module can say
HUGE = 1.7e308
SIZES = ("tokens", "text", "messages", "moved")
RUN = {"batch": 1, "tokens": 0, "text": 0, "degree": 1, "ms": TINY, "messages": 0.0, "moved": 0.0}
FIT: dict[str, Any] = {"coefficients": {"B*S": 0.0}, "residuals": [], "held_out": None, "exponent": None}
VALID: dict[str, Any] = {
    "machine": "m", "device": "cpu",
    "stages": [{"stage": "dit", "phase": "forward", "measurements": [RUN], "fit": FIT}],
    "links": {"latency": 0.0, "intra": SLOW, "inter_latency": 0.0, "inter": SLOW, "all_reduce": SLOW, "host": SLOW},
    "synchronisation": [{"stage": "dit", "ranks": 1, "bytes": 0, "reduce_ms": 0.0, "step_ms": 0.0}],
    "collectives": [{"op": "all-gather", "ranks": 2, "bytes": 1, "ms": TINY, "overlapped": 0.0}],
}  # fmt: skip
SPARSE = msgspec.to_builtins(
    fit_sparse(64, [AttentionTime(n, 0.2, 3.0, 6.0, 1.0, 2.0, 0.5) for n in (512, 1024, 4096)])
)
# Where a value stands, one that is too small, and what is said of it.
LIMITS: tuple[tuple[str, float, str], ...] = (
    ("stages.0.fit.coefficients.B*S", -TINY, "less than nothing"),
    *((f"stages.0.measurements.0.{name}", 0, "sizes below nothing") for name in ("batch", "degree")),
    *((f"stages.0.measurements.0.{name}", -1, "sizes below nothing") for name in SIZES),
    ("stages.0.measurements.0.ms", 0.0, "a measurement took 0.0 ms"),
    *((f"links.{name}", SLOW / 2, "GB/s") for name in ("intra", "inter", "all_reduce", "host")),
    *((f"links.{name}", -TINY, "us") for name in ("latency", "inter_latency")),
    ("synchronisation.0.ranks", 0, "the synchronisation of `dit`"),
    *((f"synchronisation.0.{name}", -1, "the synchronisation") for name in ("bytes", "reduce_ms", "step_ms")),
    ("collectives.0.ranks", 1, "a measured all-gather"),
    *((f"collectives.0.{name}", 0, "a measured all-gather") for name in ("bytes", "ms")),
    ("collectives.0.overlapped", -TINY, "ms longer"),
    *((place, HUGE, "the number 1.7e+308") for place in ("links.latency", "collectives.0.ms", "stages.0.fit.held_out")),
    ("stages.0.fit.coefficients.B*S", 1e7, "never end"),
    ("collectives.0.ms", 1e10, "more than 1e+09 ms"),
)  # fmt: skip


def with_value(place: str, value: object) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(VALID))
    *path, last = place.split(".")
    inner: Any = changed
    for step in path:
        inner = inner[int(step)] if step.isdigit() else inner[step]
    inner[last] = value
    return changed


def written(folder: Path, content: object) -> Path:
    path = folder / "p.profile.json"
    path.write_text(json.dumps(content))
    return path


def test_what_is_just_possible_is_a_profile(tmp_path: Path) -> None:
    read = read_profile(written(tmp_path, VALID))
    assert read.stages[0].measurements[0].ms == TINY
    for absent in ("inter_latency", "inter", "all_reduce", "host"):
        assert read_profile(written(tmp_path, with_value(f"links.{absent}", None))).links is not None
    assert read_profile(written(tmp_path, with_value("links", None))).links is None
    assert read_profile(written(tmp_path, with_value("collectives.0.op", "reduce-scatter"))).collectives
    assert read_profile(written(tmp_path, with_value("sparsity", [SPARSE]))).sparsity


@pytest.mark.parametrize(("place", "value", "says"), LIMITS, ids=[place for place, _, _ in LIMITS])
def test_what_is_less_than_that_is_none(tmp_path: Path, place: str, value: float, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_profile(written(tmp_path, with_value(place, value)))
    assert says in str(refused.value)


def test_a_profile_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, VALID)
    size = file.stat().st_size
    monkeypatch.setattr(profile, "LARGEST_PROFILE", size)
    assert read_profile(file).machine == "m"
    monkeypatch.setattr(profile, "LARGEST_PROFILE", size - 1)
    with pytest.raises(UserError, match="larger than 0 MiB"):
        read_profile(file)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("collectives.0.op", "all-to-all", "there is no collective `all-to-all`"),
        ("stages.0.fit.coefficients.S^9", 1.0, "there is no coefficient `S^9`"),
        ("stages.0.phase", 3, "Expected `str`"),
        ("stages.0.measurements.0.seconds", 1.0, "unknown field `seconds`"),
        ("sparsity", [SPARSE | {"head_size": 0}], "heads of 0"),
        ("sparsity", [SPARSE | {"coefficients": {"choice": [1.0, 2.0]}}], "parts ['choice']"),
    ],
)
def test_what_has_another_name_is_told(tmp_path: Path, place: str, value: object, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_profile(written(tmp_path, with_value(place, value)))
    assert says in str(refused.value)


@pytest.mark.parametrize("content", ["nothing", "too much", "other", "impossible"])
def test_a_file_that_is_no_profile_is_pointed_at_by_its_first_character(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"other": {"machine": 7}, "impossible": with_value("links.intra", 0.0)}.get(content, VALID)
    file = written(tmp_path, values)
    if content == "nothing":
        file.write_text("")
    if content == "too much":
        monkeypatch.setattr(profile, "LARGEST_PROFILE", 1)
    with pytest.raises(UserError) as refused:
        read_profile(file)
    (problem,) = refused.value.diagnostics
    assert problem.span == Span(str(file), line=1, column=1, end_line=1, end_column=2)


def test_a_profile_is_written_to_be_read_by_people_two_spaces_a_level(tmp_path: Path) -> None:
    write_profile(read_profile(written(tmp_path, VALID)), tmp_path / "again.json")
    text = (tmp_path / "again.json").read_bytes().decode()
    assert text.startswith('{\n  "machine": "m",\n')
    assert text.endswith("\n}\n")
    depth = 0
    for line in text.splitlines():
        depth -= line.strip()[0] in "]}"
        assert len(line) - len(line.lstrip()) == 2 * depth, line
        depth += line[-1] in "[{"
