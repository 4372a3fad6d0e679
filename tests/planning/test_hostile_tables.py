"""Tables that no text can say, or whose bytes are none, are refused in one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.ir.diagnostic import UserError, render_all
from arachnec.planning.duration_table import read_table

TABLE = b'{"tasks": [{"name": "NAME", "stages": [{"stage": "STAGE", "ms": {"1": 1}}]}]}'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (TABLE.replace(b"NAME", rb"a\ud800b"), "`name` of task 0 is a?b, expected text that UTF-8 can hold"),
        (TABLE.replace(b"STAGE", rb"\udfff"), "`stage` of task `NAME` is ?, expected"),
        (TABLE.replace(b'"ms"', rb'"\ud800"'), "unknown key `?`"),
        (TABLE.replace(b"NAME", b"\xff\xfe"), "byte 21 is no UTF-8"),
        (TABLE.replace(b": 1}", b": 1e309}"), "expected a number from 0"),
        (TABLE.replace(b": 1}", b": NaN}"), "expected a number from 0"),
        (TABLE.replace(b": 1}", b": 1" + b"0" * 400 + b"}"), "expected a number from 0"),
    ],
)
def test_a_hostile_table_is_one_message(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "table.json").write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_table(tmp_path / "table.json", parse_cluster("2:cpu"))
    message = render_all(refused.value.diagnostics)
    assert says in message
    message.encode()


def test_a_name_of_any_script_is_taken(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(TABLE.replace(b"NAME", "\u00e9\U0001f600".encode()))
    assert len(read_table(tmp_path / "table.json", parse_cluster("2:cpu")).module.cascades) == 1
