"""Golden tests: ``<pass>/<case>.cascade``, its pipeline in line 1, what `arachnec opt` prints for it in ``.expect``.

A file without a pipeline is parsed, verified and printed. Where the input is refused, the rendered errors are what is
expected. ``pytest tests/golden --update-golden`` rewrites the expectations.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.passes.infra.instruments import pipeline_of
from arachnec.passes.infra.pipeline import Pipeline

HERE = Path(__file__).parent
CASES = sorted(path.relative_to(HERE).with_suffix("").as_posix() for path in HERE.rglob("*.cascade"))


def opt(case: str) -> str:
    """What `arachnec opt` prints, or the errors it shows."""
    text = (HERE / f"{case}.cascade").read_text(encoding="utf-8")
    try:
        passes = pipeline_of(text)
        pipeline = Pipeline.parse(passes) if passes else Pipeline(())
        return print_module(pipeline.run(parse_module(text, f"{case}.cascade")))
    except UserError as error:
        return "\n".join(map(render, error.diagnostics)) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_opt_prints_what_is_expected(case: str, request: pytest.FixtureRequest) -> None:
    printed, expect = opt(case), HERE / f"{case}.expect"
    if request.config.getoption("--update-golden"):
        expect.write_text(printed, encoding="utf-8")
    assert expect.is_file(), f"{case}.expect is missing: run pytest tests/golden --update-golden and read it"
    assert printed == expect.read_text(encoding="utf-8")


def test_no_expectation_stands_alone() -> None:
    alone = [path.name for path in HERE.rglob("*.expect") if not path.with_suffix(".cascade").is_file()]
    assert not alone


@pytest.mark.parametrize("case", CASES)
def test_every_golden_module_survives_printing_and_parsing(case: str) -> None:
    for path in (HERE / f"{case}.cascade", HERE / f"{case}.expect"):
        text = path.read_text(encoding="utf-8")
        if text.startswith("error: "):
            continue
        try:
            module = parse_module(text)
        except UserError:
            assert path.suffix == ".cascade", "an expectation that is no error is a module"
            continue
        assert parse_module(print_module(module)) == module
