"""What a profile in DAPPLE's format may hold at most, and the place of an error in it: its whole line."""

from __future__ import annotations

import pytest

from arachnec.ir.diagnostic import Diagnostic, Span, UserError, render
from arachnec.ir.limits import LARGEST, LONGEST_LINE
from arachnec.pipelining import profile_file
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


def told(text: str) -> tuple[Diagnostic, ...]:
    with pytest.raises(UserError) as refused:
        read_profile(text, "layers.txt")
    return refused.value.diagnostics


def node(name: str, **sizes: str) -> str:
    fields = dict.fromkeys(profile_file.FIELDS, "1") | sizes
    return f"{name} -- Conv -- {', '.join(f'{field}={size}' for field, size in fields.items())}\n"


@pytest.mark.parametrize(("layers", "edges"), [(3, 4), (2, 0), (5, 1)])
def test_a_profile_may_have_as_many_layers_and_edges_as_the_limits_and_no_more(
    layers: int, edges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines behind the last layer are edges, or empty; the last line ends no row."""
    monkeypatch.setattr(profile_file, "MOST_LAYERS", layers)
    monkeypatch.setattr(profile_file, "MOST_EDGES", edges)
    full = "".join(node(f"node{k}") for k in range(layers))
    most = full + "\tnode0 -- node1\n" * edges
    assert len(read_profile(most[:-1], "layers.txt").layers) == layers
    assert len(read_profile(full.replace("node0", "\n" * edges + "node0", 1)[:-1], "layers.txt").layers) == layers
    refused = (
        f"the profile has more than {layers} layers or {edges} edges",
        Span("layers.txt", layers + 1, 1, layers + 1, 2),
    )
    for text in (most + "\tnode0 -- node1", most + "\n" * (1 + edges), full + node("more"), most + "x\n" * 9):
        (diagnostic,) = told(text)
        assert (diagnostic.message, diagnostic.span) == refused


def test_a_node_that_stands_twice_is_named() -> None:
    (repeated,) = told(node("node7") + node("node7"))
    assert repeated.message == "`node7` stands twice in the profile"


@pytest.mark.parametrize("field", profile_file.FIELDS)
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("[16; x]", "no number"),
        ("[x; 16]", "no number"),
        ("", "no number"),
        ("nan", "not finite"),
        ("[1; inf]", "not finite"),
        ("[3; -1]", "negative"),
        (f"{LARGEST * 1.001:.17g}", f"above {LARGEST:g}"),
        (f"[{LARGEST:.17g}; {LARGEST * 1e-3:.17g}]", f"above {LARGEST:g}"),
    ],
)
def test_a_size_is_a_number_or_a_list_of_them_not_negative_and_no_larger_than_the_largest(
    field: str, given: str, reason: str
) -> None:
    (bad,) = told(node("node1", **{field: given}))
    assert bad.message == f"`{field}` is `{given[:40]}`: {reason}"


def test_a_size_may_be_the_largest_or_nothing_and_those_of_a_list_are_summed() -> None:
    sizes = dict(zip(profile_file.FIELDS, (f"{LARGEST:.17g}", "0", "[16; 32;.5]", "[7]"), strict=True))
    (layer,) = read_profile(node("node1", **sizes), "layers.txt").layers
    assert (layer.forward, layer.backward, layer.activation, layer.parameters) == (LARGEST, 0, 48.5, 7)


@pytest.mark.parametrize(("length", "read"), [(LONGEST_LINE, True), (LONGEST_LINE + 1, False)])
def test_a_line_may_be_as_long_as_the_limit_and_no_longer(length: int, read: bool) -> None:
    line = node("node1").strip()
    line = line.replace("Conv", "C" * (length - len(line) + 4))
    assert len(line) == length
    if read:
        assert len(read_profile(line, "layers.txt").layers) == 1
    else:
        assert [one.message for one in told(line)] == ["no node and no edge of a profile"]
