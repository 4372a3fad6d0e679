"""What an encoder costs where more ranks than clips share it."""

from dataclasses import replace

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.cost.communication import Volumes, encoder_volumes
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term

BS, B = (("B", 1), ("S", 1)), (("B", 1),)
TOKENS = 20_000


def formula(unit: str, *terms: tuple[float, tuple[tuple[str, int], ...]]) -> Formula:
    return Formula(tuple(Term(value, powers) for value, powers in terms), unit)


VAE = Stage(
    "vae",
    False,
    Attributes.of(
        forward=formula("ms", (1e-1, BS), (2.0, ())),
        workspace=formula("GiB", (1e-3, BS), (1.0, B)),
        output=formula("GiB", (1e-6, BS)),
        state=Quantity(0.5, "GiB"),
        divides=90,
        undivided=0.1,
        held=formula("GiB", (1e-4, BS)),
        halo=formula("GiB", (1e-5, BS)),
        exchanges=100,
    ),
)
CLIP = Cascade("0", Phase.ENCODE, "vae", (0,), 1, TOKENS, 100)
THREE = replace(CLIP, clips=(0, 1, 2), batch=3)


def model(stage: Stage = VAE, cluster: str = "2x8:h100-80g") -> CostModel:
    return CostModel(Module("m", Level.COSTED, parse_cluster(cluster), stages=(stage,), cascades=(CLIP,)))


def without(*names: str) -> Stage:
    return replace(VAE, attrs=VAE.attrs.updated(**dict.fromkeys(names)))


def test_it_has_degrees_like_any_other_cascade_and_without_division_as_many_as_clips() -> None:
    assert model().legal_degrees(CLIP) == tuple(range(1, 17))
    assert model(cluster="32x8:h100-80g").legal_degrees(CLIP)[-1] == 90
    assert model(without("divides")).legal_degrees(THREE) == (1, 2, 3)


def test_the_time_is_divided_but_for_a_part_and_for_what_is_exchanged() -> None:
    still = model(without("halo", "exchanges", "output"))
    clip = 1e-1 * TOKENS
    for ranks in (2, 5, 8):
        latency = still.communication(CLIP, still.best_attention(CLIP, ranks), tuple(range(ranks)))
        assert still.time(CLIP, ranks) == pytest.approx(2.0 + clip * (0.1 + 0.9 / ranks) + latency)
    assert model().time(CLIP, 8) > still.time(CLIP, 8)
    assert model().time(CLIP, 16) > model().time(CLIP, 16, ranks=tuple(range(16))) * 0.99  # over the network


def test_several_clips_are_dealt_out_whole_or_shared_one_after_the_other() -> None:
    cost = model()
    alone = cost.time(CLIP, 1)
    assert cost.time(THREE, 3) == pytest.approx(alone, rel=1e-2)
    assert cost.time(THREE, 6) == pytest.approx(3 * cost.time(CLIP, 6), rel=1e-2)
    measured = THREE.with_attrs(per_clip=Quantity(600.0, "ms"))
    assert cost.time(measured, 6) - cost.communication(THREE, cost.best_attention(THREE, 6), tuple(range(6))) == (
        pytest.approx(3 * 600.0 * (0.1 + 0.9 / 6))
    )


@pytest.mark.parametrize("grid", [(4, 1), (2, 2), (1, 4)])
def test_whatever_the_grid_all_its_ranks_share_a_clip_that_there_are_too_few_of(grid: tuple[int, int]) -> None:
    """Four ranks exchange the halos of each of three clips, and with four clips each has one."""
    split, four = Attention(*grid), replace(THREE, batch=4)
    output, halo = 1e-6 * TOKENS * 2**30, 1e-5 * TOKENS * 2**30
    for coded, bytes_of_one, times in ((THREE, output + halo, 3 * (1 + 100)), (four, output, 1)):
        sent = encoder_volumes(coded, VAE, split)
        assert sent == Volumes(*grid, gathered=sent.gathered, gathers=times)
        assert sent.gathered == pytest.approx(coded.batch * bytes_of_one)


def test_memory_falls_with_the_degree_down_to_what_every_rank_holds() -> None:
    cost = model()
    sizes = [cost.memory(CLIP, ranks) for ranks in (1, 2, 4, 16)]
    held, output = 1e-4 * TOKENS, 1e-6 * TOKENS
    alone = 1e-3 * TOKENS + 1.0
    assert sizes == pytest.approx([output + held + (alone - held) / ranks for ranks in (1, 2, 4, 16)])
    assert cost.memory(THREE, 6) == pytest.approx(held + (alone - held) / 6 + 3 * output)  # one clip at a time
