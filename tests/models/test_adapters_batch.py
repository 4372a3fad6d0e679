"""Micro-batches: the same noise for a clip wherever it is, and what cannot be batched is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, render
from arachnec.models.batch import clip_seed, make_batch, prediction_of
from arachnec.models.file import ModelFile, load_model_file

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIP = VideoClip("a", 5, 32, 48, 6, "a cat")


@pytest.fixture(scope="module")
def plain() -> ModelFile:
    return load_model_file(EXAMPLES / "plain_dit.py")


def model_file(folder: Path, body: str) -> ModelFile:
    path = folder / "model.py"
    path.write_text(f"import torch\ndef build(): ...\ndef sample(clip, generator):\n{body}\ndef loss(p, t): ...\n")
    return load_model_file(path)


def message(model: ModelFile) -> str:
    clips = [replace(CLIP, id=id) for id in ("a", "b")]
    with pytest.raises(UserError) as caught:
        make_batch(model, clips, 0, 0, "cpu")
    return render(*caught.value.diagnostics).splitlines()


def test_a_clips_seed_depends_on_seed_step_and_clip_and_on_nothing_else() -> None:
    seeds = {clip_seed(seed, step, clip) for seed in range(3) for step in range(3) for clip in (0, 1, "a", "1/0")}
    assert len(seeds) == 36 and all(0 <= seed < 2**63 for seed in seeds)
    assert clip_seed(0, 0, 7) == clip_seed(0, 0, "7") == 3233296172722718250


def test_a_clips_arguments_do_not_depend_on_the_rest_of_its_batch(plain: ModelFile) -> None:
    clips = [replace(CLIP, id=id) for id in ("a", "b", "c")]
    together, target = make_batch(plain, clips, 0, 5, "cpu")
    backwards, _ = make_batch(plain, clips[::-1], 0, 5, "cpu")
    for index, clip in enumerate(clips):
        alone, own_target = make_batch(plain, [clip], 0, 5, "cpu")
        for name, value in alone.items():
            assert torch.equal(together[name][index : index + 1], value)
            assert torch.equal(backwards[name][2 - index : 3 - index], value)
        assert torch.equal(target[index : index + 1], own_target)


def test_a_batch_without_mistakes_does_not_parse_the_model_file(
    plain: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a mistake would be pointed at is worked out for mistakes alone: steps would wait for it."""

    def parsed(self: ModelFile, name: str) -> None:
        raise AssertionError(f"the place of {name}")

    monkeypatch.setattr(ModelFile, "span", parsed)
    make_batch(plain, [CLIP, replace(CLIP, id="b")], 0, 0, "cpu")


def test_noise_changes_with_the_step(plain: ModelFile) -> None:
    first, second = (make_batch(plain, [CLIP], 0, step, "cpu")[0]["t"] for step in (0, 1))
    assert not torch.equal(first, second)


def test_the_global_random_state_is_neither_read_nor_moved(plain: ModelFile) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, _ = make_batch(plain, [CLIP], 0, 0, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first["latents"], make_batch(plain, [CLIP], 0, 0, "cpu")[0]["latents"])


def test_the_loss_of_a_batch_of_equal_clips_is_the_mean_of_theirs(plain: ModelFile) -> None:
    torch.manual_seed(0)
    model = plain.build()
    clips = [replace(CLIP, id=id) for id in range(3)]

    def loss(batch: list[VideoClip]) -> torch.Tensor:
        arguments, target = make_batch(plain, batch, 0, 0, "cpu")
        return plain.loss(prediction_of(model(**arguments)), target)

    torch.testing.assert_close(loss(clips), torch.stack([loss([clip]) for clip in clips]).mean())


def test_what_has_no_batch_dimension_is_passed_once(tmp_path: Path) -> None:
    body = "    return {'x': torch.zeros(1, 3), 'table': torch.ones(5), 'pair': (torch.ones(1, 2), 3)}, torch.ones(1)"
    arguments, target = make_batch(model_file(tmp_path, body), [CLIP, replace(CLIP, id="b")], 0, 0, "cpu")
    assert arguments["x"].shape == (2, 3) and target.shape == (2,)
    assert arguments["table"].shape == (5,) and arguments["pair"][0].shape == (1, 2)


def test_on_the_meta_device_nothing_is_drawn(plain: ModelFile) -> None:
    arguments, target = make_batch(plain, [CLIP], 0, 0, "meta")
    assert target.is_meta and all(value.is_meta for value in arguments.values())


def test_encoders_outputs_reach_their_clips(tmp_path: Path) -> None:
    model = model_file(tmp_path, "    return {'x': clip.encoded['vae'] + 1}, clip.encoded['vae']")
    encoded = {"vae": torch.arange(6.0).view(2, 3)}
    arguments, target = make_batch(model, [CLIP, replace(CLIP, id="b")], 0, 0, "cpu", encoded=encoded)
    assert torch.equal(arguments["x"], encoded["vae"] + 1) and torch.equal(target, encoded["vae"])


def test_a_precision_is_given_to_batched_activations_only(tmp_path: Path) -> None:
    body = (
        "    return {'x': torch.zeros(1, 3), 't': torch.zeros(1), 'i': torch.zeros(1, 2).long(), 'r': torch.ones(5, 2)}"
    )
    model = model_file(tmp_path, body + ", torch.ones(1, 3)")
    arguments, target = make_batch(model, [CLIP], 0, 0, "cpu", dtype=torch.bfloat16)
    assert [arguments[name].dtype for name in ("x", "t", "i", "r")] == [
        torch.bfloat16,
        torch.float32,
        torch.int64,
        torch.float32,
    ]
    assert target.dtype == torch.float32


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (
            "    return {'rope': torch.rand(4, generator=generator)}, torch.ones(1)",
            "error: `rope` has no batch dimension and differs between the equal clips a and b",
        ),
        (
            "    return {'name': clip.id}, torch.ones(1)",
            "error: `name` has no batch dimension and differs between the equal clips a and b",
        ),
        ("    return torch.ones(1)", "error: `sample` returned Tensor, not a pair"),
        ("    return [1], torch.ones(1)", "error: `sample` returned list in place of keyword arguments"),
        ("    return {}, 3.0", "error: `sample` returned float in place of a target tensor"),
    ],
)
def test_what_sample_gets_wrong_is_said_at_its_line(tmp_path: Path, body: str, line: str) -> None:
    lines = message(model_file(tmp_path, body))
    assert lines[0] == line and lines[1].endswith("model.py:3:1")


def test_the_prediction_is_the_output_or_its_first_element() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    assert prediction_of(one) is one
    assert prediction_of((one, two)) is one
    assert prediction_of({"sample": one, "rest": two}) is one
