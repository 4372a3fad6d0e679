"""Who computes which heads: given ones stay, one rank has all, and clips of equal shape are divided alike."""

from __future__ import annotations

from dataclasses import replace

from arachnec.ir.head_density import CUT, parts_by_layer
from arachnec.ir.nodes import Clip, Module, Phase, Stage
from arachnec.ir.values import Value
from arachnec.lowering.head_division import with_heads
from tests.passes.plans import DIT, cluster, module_of, timed

CLIP = Clip(0, 17, 480, 832, 0, 1000)
DENSITY = ((((2,)), 0.5, (0.9, 0.1, 0.1)), (((5,)), 0.5, (0.1, 0.9, 0.1)), (((7,)), 0.5, (0.9, 0.1, 0.1)))


def stage(**said: Value | None) -> Stage:
    return replace(DIT, attrs=DIT.attrs.updated(heads=3, density=DENSITY, **said))


def planned(of: Stage, **said: Value | None) -> Module:
    """Of a clip on two ranks the layers 2, 5 and 7 are sparse."""
    cascade = timed("t", Phase.TRAIN, 0, 1000, (), (0.0, 10.0), (0, 1))
    attrs = cascade.attrs.updated(**{"sparse": (2, 5, 7)} | said)
    return replace(module_of(cluster(), [CLIP], [replace(cascade, attrs=attrs)]), stages=(of,))


def test_every_head_of_every_sparse_layer_is_somebodys() -> None:
    """Layers that are divided alike are one row; the dense head of each is alone, or cut."""
    (cascade,) = with_heads(planned(stage(query_group=100)))
    assert cascade.attrs["groups"] == 10
    rows = cascade.attrs["heads"]
    assert isinstance(rows, tuple)
    assert [row[0] for row in rows] == [(2, 7), (5,)]  # type: ignore[index]
    for _, places, cut in rows:  # type: ignore[misc]
        assert len(places) == 3
        assert set(places) <= {CUT, 0, 1}
        parts = [tuple(cut[at : at + 4]) for at in range(0, len(cut), 4)]
        for head, place in enumerate(places):
            whole = sorted((start, stop) for own, _, start, stop in parts if own == head)
            assert (whole == []) if place != CUT else (whole[0][0], whole[-1][1]) == (0, 10)


def test_one_sparse_layer_is_divided_like_many() -> None:
    (all_three,) = with_heads(planned(stage(query_group=100)))
    (one,) = with_heads(planned(stage(query_group=100), sparse=(5,)))
    assert one.attrs["heads"] == tuple(row for row in all_three.attrs["heads"] if row[0] == (5,))  # type: ignore[union-attr,index]


def test_clips_of_another_class_of_length_are_divided_by_its_densities() -> None:
    """Both have as many groups. The class of 512 tokens has its own densities of layer 2, that of 1024 has not."""
    by_class = stage(query_group=100)
    rows = (*DENSITY, ((2,), 0.5, (0.1, 0.1, 0.9), 512))
    by_class = replace(by_class, attrs=by_class.attrs.updated(density=rows))
    both = planned(by_class)
    (long,) = both.cascades
    cascades = (long, replace(long, name="u", tokens=1024, clips=()), replace(long, name="v", clips=()))
    first, other, again = with_heads(replace(both, cascades=cascades))
    before, swapped = with_heads(planned(stage(query_group=100)))[0], parts_by_layer(first)[2]
    assert first.attrs["heads"] == again.attrs["heads"] != before.attrs["heads"]
    assert {part.head for part in swapped if (part.start, part.stop) != (0, 10)} <= {2}, "the dense one may be cut"
    of_all = parts_by_layer(before)
    assert parts_by_layer(first)[5] == of_all[5] and of_all[2] == of_all[7] == parts_by_layer(first)[7]
    assert {p.head for p in parts_by_layer(other)[2] if p.stop - p.start < other.attrs["groups"]} <= {0}  # type: ignore[operator]


def test_given_heads_stay_and_one_rank_has_all() -> None:
    given = (((2, 5, 7), (0, 1, 1), ()),)
    (cascade,) = with_heads(planned(stage(query_group=100), heads=given, groups=10))
    assert cascade.attrs["heads"] == given
    alone = planned(stage(query_group=100))
    (one,) = alone.cascades
    (same,) = with_heads(replace(alone, cascades=(one.with_attrs(degree=1, ranks=(0,)),)))
    assert "heads" not in same.attrs
    (dense,) = with_heads(replace(alone, cascades=(one.with_attrs(sparse=None),)))
    assert "heads" not in dense.attrs
