"""The place of an error in a profile in DAPPLE's format: its whole line."""

from __future__ import annotations

import pytest

from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.span import Span
from arachnec.pipelining.profile_file import read_profile

NODE = "node1 -- Conv -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=8.0, parameter_size=4.0\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("\n  no layer", (2, 1, 2, 11)),
        (NODE + "\tnode1 -- node2\n", (2, 1, 2, 16)),
        (NODE + NODE, (2, 1, 2, len(NODE))),
        ("", (1, 1, 1, 2)),
    ],
    ids=["line", "edge", "repeated", "empty"],
)
def test_an_error_is_told_with_its_whole_line(text: str, place: tuple[int, int, int, int]) -> None:
    with pytest.raises(UserError) as refused:
        read_profile(text, "layers.txt")
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.span == Span("layers.txt", *place, text)


def test_a_wrong_line_is_underlined_from_end_to_end() -> None:
    with pytest.raises(UserError) as refused:
        read_profile("no layer\n", "layers.txt")
    rows = render(refused.value.diagnostics[0]).splitlines()
    assert rows[3:5] == [" 1 | no layer", f"   | {'^' * 8} {rows[4].partition('^ ')[2]}"]
