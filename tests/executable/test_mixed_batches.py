"""Several manifests mixed by weight: drawn as often as their weights say, from the seed and the step alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.batches.drawn_batches import demand_no_order
from arachnec.driver import compile
from arachnec.executable.batches import CHUNK, MixedBatches, Mixture, mixed_manifest
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Mix, Source, Training, verified
from arachnec.ir.diagnostic import UserError
from tests.distributed.executor_cases import MODEL, Work, executable, plain_loop, train_on

MIXTURE = Mixture(3, (5, 11), (3.0, 1.0))


def test_lists_are_drawn_from_by_weight_and_each_clip_once_a_round() -> None:
    drawn = MIXTURE.places(0, 4000)
    counts = Counter(chosen for chosen, _ in drawn)
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.03)
    for chosen, size in enumerate(MIXTURE.sizes):
        places = [place for own, place in drawn if own == chosen]
        rounds = [places[i : i + size] for i in range(0, len(places) - size + 1, size)]
        assert all(sorted(one) == list(range(size)) for one in rounds)
        assert len(set(map(tuple, rounds))) > 1


def test_a_draw_depends_on_its_number_and_nothing_else() -> None:
    whole = MIXTURE.places(0, CHUNK + 50)
    for first in (0, 7, CHUNK - 3, CHUNK + 20):
        assert MIXTURE.places(first, 10) == whole[first : first + 10]
    assert Mixture(4, MIXTURE.sizes, MIXTURE.weights).places(0, 20) != whole[:20]


def mixed(folder: Path, **changed: object) -> Training:
    sizes = {"frames": 2, "height": 16, "width": 16, "text_tokens": 0}
    for name, count in (("films", 5), ("stills", 3)):
        rows = [json.dumps({**sizes, **changed}) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    sources = (Source(str(folder / "films.jsonl"), 3.0), Source(str(folder / "stills.jsonl")))
    return Training(lr=0.05, mix=Mix(2, sources))


def test_a_resumed_run_draws_on_and_the_first_batch_is_the_one_that_was_compiled(tmp_path: Path) -> None:
    training = mixed(tmp_path)
    manifest = mixed_manifest(training)
    assert len(manifest.clips) == len({clip.id for clip in manifest.clips}) == 8
    works = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]
    folder = executable(tmp_path / "x", manifest.iterations, works, 2, training=training)
    batches = MixedBatches(read_executable(folder), training)
    first = batches.draw(0)
    assert [clip.id for clip in first.clips.values()] == [clip.id for clip in manifest.iterations[0]]
    whole = train_on(2, folder, steps=4, checkpoint=tmp_path / "whole")["steps"]
    train_on(2, folder, steps=2, checkpoint=tmp_path / "cut")
    rest = train_on(2, folder, more=2, checkpoint=tmp_path / "cut", resume=True)["steps"]
    assert [step["loss"] for step in rest] == [step["loss"] for step in whole[2:]]
    loss, _ = plain_loop(folder, list(first.clips.values()))
    assert whole[0]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_clip_that_comes_twice_in_a_batch_has_two_names(tmp_path: Path) -> None:
    training = mixed(tmp_path)
    manifest = mixed_manifest(training)
    folder = executable(tmp_path / "x", manifest.iterations, [Work((0,), (0,), 0.0), Work((1,), (0,), 1.0)], 1)
    wide = Training(mix=Mix(20, training.mix.manifests))
    drawn = MixedBatches(read_executable(folder), wide).draw(0)
    names = [clip.id for clip in drawn.clips.values()]
    assert len(names) == len(set(names)) == 20
    assert any(str(name).endswith("#1") for name in names)


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        (Mix(0, (Source("a"),)), r"mix\.batch = 0"),
        (Mix(3), r"`mix\.batch` is 3: the mix has no manifests"),
        (Mix(1, (Source("a", 0.0),)), "a weight is above zero"),
        (Mix(1, (Source("a", float("nan")),)), "a weight is above zero"),
        (Mix(1, (Source("a"), Source("a"))), "one is listed twice"),
        (Mix(1, (Source(" "),)), "it is empty"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(mix: Mix, told: str) -> None:
    with pytest.raises(UserError, match=told):
        verified(Training(mix=mix))


def test_a_mix_that_is_refused_is_shown_by_its_manifests(tmp_path: Path) -> None:
    training = Training(mix=Mix(2, (Source("films.jsonl", 3.0), Source("stills.jsonl"))))
    (tmp_path / "model.py").write_text(MODEL)
    told = r"`mix` is \['films.jsonl', 'stills.jsonl'\]:"
    with pytest.raises(UserError, match=told):
        compile(tmp_path / "model.py", tmp_path / "clips.jsonl", "1:cpu", training=training)
    with pytest.raises(UserError, match=told):
        demand_no_order(training)


def test_manifests_with_batches_of_their_own_are_refused(tmp_path: Path) -> None:
    training = mixed(tmp_path)
    rows = [{"frames": 1, "height": 16, "width": 16, "text_tokens": 0, "iteration": n} for n in range(2)]
    (tmp_path / "films.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="a mix draws its own batches"):
        mixed_manifest(training)
