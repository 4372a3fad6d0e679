"""Every file belongs to one feature or to the core, and three figures of how they are joined only fall.

``python -m tests.house.features`` prints what is counted and the figures.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.house.features import (
    Table,
    core_to_feature,
    entries_without_a_file,
    files_without_a_row,
    functions_in,
    functions_naming_two,
    read_table,
    table,
    upward_among_features,
)

# Lower a ceiling when its figure falls. None rises.
CEILINGS: dict[Callable[[], list[str]], int] = {
    core_to_feature: 191,
    upward_among_features: 26,
    functions_naming_two: 52,
}


@pytest.mark.parametrize("count", CEILINGS, ids=lambda count: count.__name__)
def test_the_figure_is_at_its_ceiling(count: Callable[[], list[str]]) -> None:
    counted, ceiling = count(), CEILINGS[count]
    assert len(counted) <= ceiling, f"{len(counted)}, and at most {ceiling} are allowed:\n" + "\n".join(counted)
    assert len(counted) == ceiling, f"lower the ceiling of {count.__name__} to {len(counted)}"


def test_every_file_has_an_owner_and_every_entry_a_file() -> None:
    assert not files_without_a_row()
    assert not entries_without_a_file()
    assert not table().repeated


ROWS = """
| feature | folder | files |
|---|---|---|
| sampling | `arachnec/sampling/` | all |
| sparse | `arachnec/sampling/` | `lists.py` |
| shards | `arachnec/cost/` | `gathering.py`, `shares.py` |

| core | folder | files |
|---|---|---|
| cost | `arachnec/cost/` | all |
"""


def test_the_most_specific_entry_owns_a_file() -> None:
    rows = read_table(ROWS)
    files = ("sampling/loop.py", "sampling/lists.py", "cost/shares.py", "cost/deep/table.py", "solver/bound.py")
    assert [rows.owner(f"arachnec/{file}") for file in files] == ["sampling", "sparse", "shards", "cost", ""]
    assert rows.features == ("sampling", "sparse", "shards")


def test_an_import_of_a_higher_feature_goes_up() -> None:
    rows = read_table(ROWS)
    gathering, lists, cost = "arachnec/cost/gathering.py", "arachnec/sampling/lists.py", "arachnec/cost/table.py"
    assert rows.goes_up(gathering, lists)
    assert not rows.goes_up(lists, gathering)
    assert not rows.goes_up(cost, lists)
    assert not rows.goes_up(gathering, "arachnec/cost/shares.py")


def test_an_entry_in_two_rows_is_seen() -> None:
    assert read_table(ROWS + "| solver | `arachnec/cost/` | all |\n").repeated == ("arachnec/cost/",)
    assert read_table(ROWS) == Table(read_table(ROWS).owners, read_table(ROWS).features)


@pytest.mark.parametrize("row", ["| cost | arachnec/solver/ | all |", "| sparse | `arachnec/solver/` | all |"])
def test_a_row_that_says_nothing_is_refused(row: str) -> None:
    with pytest.raises(ValueError, match="not a row"):
        read_table(f"{ROWS}{row}\n")


def test_a_function_that_names_two_features_is_seen() -> None:
    joint = "def chosen(stage):\n    return stage.offload and 'dapple' in stage.layout\n"
    one = "def chosen(stage):\n    '''Not for sparse stages.'''\n    return stage.offload\n"
    assert list(functions_in(joint)) == [(1, "chosen", ["pipelines", "host_memory"])]
    assert not list(functions_in(one))
