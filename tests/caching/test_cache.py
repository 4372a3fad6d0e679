"""Encoders run beforehand: training from their files is that from the clips, and only what is missing is encoded."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from arachnec.backends.cascade_step import encode_loaded
from arachnec.caching import manifest as planning
from arachnec.caching import rank as caching_rank
from arachnec.caching.files import DIVIDED, Divided, EncodedFiles, identity_of, read_rows, together
from arachnec.caching.manifest import CLIPS, Cached, Encoding, Run, cache, encoding_plan
from arachnec.caching.rank import SET_ASIDE, encode_batches
from arachnec.caching.worker import follow, lead
from arachnec.cluster.file import parse_cluster
from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_beforehand, read_encoded
from arachnec.data.manifest import Manifest, read_manifest
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, render
from arachnec.launch.phases import Progress, Timeouts
from arachnec.models.encoders import TextEncoder, VideoEncoder
from arachnec.models.file import load_model_file
from arachnec.tracing.sample_reads import demand_captions_read
from tests.distributed.executor_cases import ENCODER, MODEL, Work, captured_once, clip, executable, train_on
from tests.distributed.harness import run_ranks

CLIPS_OF_A_STEP = [clip("a", 2), clip("b", 2, start=3), clip("c", 3), clip("d", 2, start=1)]
BROKEN = """

class Vae(Vae):
    def load(self, clip, device):
        if torch.device(device).type != "meta" and clip.id in {broken}:
            raise OSError(f"{{clip.id}}.mp4 is damaged")
        return super().load(clip, device)
"""


def encoding(folder: Path, more: str = "", ranks: int = 2) -> Encoding:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(MODEL + ENCODER + more)
    return Encoding(load_model_file(folder / "model.py"), ("vae",), parse_cluster(f"{ranks}:cpu"))


def files_of(given: Encoding, folder: Path) -> EncodedFiles:
    return EncodedFiles(folder, identity_of(given.model_file, given.names, given.seed, given.init), given.names)


def encoded_on_ranks(given: Encoding, files: EncodedFiles, clips: list[VideoClip], batch: int = 3) -> Path:
    """What ``cache`` has its ranks do, on ranks that are there already."""
    with captured_once():
        plan = encoding_plan(given, files.missing(clips), files.folder / "plan", batch)
    run_ranks(given.cluster.world, _encode, plan, files)
    return plan


def _encode(plan: Path, files: EncodedFiles) -> None:
    encode_batches(read_executable(plan), files, None, torch.device("cpu"))


def nothing_to_run(given: Encoding, files: EncodedFiles, plan: Path) -> None:
    raise AssertionError("all files are there")


def listed(given: Encoding, clips: list[VideoClip], folder: Path, run: Run = nothing_to_run) -> Path:
    manifest = Manifest((tuple(clips),), folder / "clips.jsonl")
    return cache(given, manifest, folder, batch=None, run=run).manifest


def test_training_from_the_files_is_training_from_the_clips(tmp_path: Path) -> None:
    given = encoding(tmp_path)
    encoded_on_ranks(given, files_of(given, tmp_path / "latents"), CLIPS_OF_A_STEP)
    clips = list(read_manifest(listed(given, CLIPS_OF_A_STEP, tmp_path / "latents")).clips)
    assert [c.id for c in clips] == ["a", "b", "c", "d"]
    assert encoded_beforehand(clips) == {"vae"}
    plan = [Work((0, 1), (0, 1), 2), Work((2,), (0,), 3), Work((3,), (1,), 3)]
    encoders = [Work((0, 1), (0, 1), 0, "vae"), Work((2,), (0,), 1, "vae"), Work((3,), (1,), 1, "vae")]
    reading = [replace(work, inputs=(f"c{n}",)) for n, work in enumerate(plan)]
    videos = executable(tmp_path / "v", [CLIPS_OF_A_STEP], [*encoders, *reading], 2, encoder=True)
    cached = executable(tmp_path / "c", [clips], plan, 2, encoder=False, more=ENCODER)
    steps = [
        train_on(2, folder, steps=2, save_gradients=tmp_path / f"{folder.name}.safetensors")["steps"]
        for folder in (videos, cached)
    ]
    assert [step["loss"] for step in steps[0]] == [step["loss"] for step in steps[1]]
    there, here = (load_file(tmp_path / f"{name}.safetensors") for name in ("v", "c"))
    assert all(torch.equal(there[name], here[name]) for name in there)


def test_ranks_that_divide_an_encoder_by_width_write_what_one_rank_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = encoding(tmp_path)
    whole, divided = (files_of(given, tmp_path / name) for name in ("whole", "divided"))
    encoded_on_ranks(given, whole, CLIPS_OF_A_STEP)
    pipeline = planning.PIPELINE.replace("divide-encoders", "divide-encoders{ranks=2}")
    monkeypatch.setattr(planning, "PIPELINE", pipeline)
    plan = encoded_on_ranks(given, divided, CLIPS_OF_A_STEP)
    assert sum(row.clips for row in read_rows(plan / DIVIDED, Divided)) == len(CLIPS_OF_A_STEP)
    assert {(row.encoder, row.ranks) for row in read_rows(plan / DIVIDED, Divided)} == {("vae", 2)}
    assert not read_rows(whole.folder / "plan" / DIVIDED, Divided)
    assert all(cascade.ranks == (0, 1) for cascade in read_executable(plan).program.cascades)
    for one in CLIPS_OF_A_STEP:
        torch.testing.assert_close(load_file(divided.path("vae", one)), load_file(whole.path("vae", one)))


def test_only_what_is_missing_is_encoded_and_equal_clips_share_a_file(tmp_path: Path) -> None:
    given = encoding(tmp_path)
    twin = replace(CLIPS_OF_A_STEP[0], id="twin")
    clips = [*CLIPS_OF_A_STEP, twin]
    files = files_of(given, tmp_path / "latents")
    assert [c.id for c in files.missing(clips)] == ["a", "b", "c", "d"]
    encoded_on_ranks(given, files, clips)
    assert not files.missing(clips)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "latents" / "vae").rglob("*.safetensors")}
    assert len(kept) == 4
    gone = files.path("vae", clips[2])
    gone.unlink()
    (gone.parent / "x.1.part").write_bytes(b"half")  # of a run that was killed
    cut = files.path("vae", clips[3])
    cut.write_bytes(cut.read_bytes()[:-4])
    files.sweep()
    assert [c.id for c in files.missing(clips)] == ["c", "d"]
    encoded_on_ranks(given, files, clips)
    now = {path: path.stat().st_mtime_ns for path in (tmp_path / "latents" / "vae").rglob("*") if path.is_file()}
    assert {path for path in now if now[path] != kept.get(path)} == {gone, cut}
    assert all(
        torch.equal(read_encoded(c)["vae"], _plain(given, c))
        for c in read_manifest(listed(given, clips, tmp_path / "latents")).clips
        if c.id != "b" and c.id != "d"
    )  # rows carry no `start` of what is encoded


def test_ranks_of_several_hosts_encode_what_rank_0_plans_into_the_folder_that_they_share(tmp_path: Path) -> None:
    given = encoding(tmp_path)
    (seen, again), follower = run_ranks(2, _on_hosts, tmp_path)
    assert (seen, again, follower) == (4, 0, ["vae"])
    clips = read_manifest(tmp_path / "latents" / CLIPS).clips
    assert all(torch.equal(read_encoded(c)["vae"], _plain(given, c)) for c in clips if c.id in "ac")


def test_what_was_divided_is_told_once_for_each_encoder_degree_and_shape() -> None:
    rows = [Divided("vae", 2, 81, 480, 832, 1), Divided("vae", 4, 81, 480, 832, 1), Divided("vae", 2, 81, 480, 832, 2)]
    told = together(rows)
    assert [(row.ranks, row.clips) for row in told] == [(2, 3), (4, 1)]
    assert told[0].text() == "vae was divided over 2 ranks for 3 clips of 81x480x832"
    cached = Cached(Path("clips.jsonl"), 4, 0, {}, tuple(told), 1.0)
    assert cached.report["divided"][1] == {
        "encoder": "vae",
        "ranks": 4,
        "frames": 81,
        "height": 480,
        "width": 832,
        "clips": 1,
    }


def _on_hosts(folder: Path) -> tuple[int, int] | list[str]:
    """How many clips rank 0 had encoded the first and the second time; the encoders that rank 1 was asked for."""
    ran: list[str] = []

    def encode(plan: Path, files: EncodedFiles) -> None:
        ran.extend(files.encoders)
        encode_batches(read_executable(plan), files, None, torch.device("cpu"))

    output = folder / "latents"
    if dist.get_rank():
        follow(1, output, encode)
        follow(1, output, encode)
        return ran
    given = Encoding(load_model_file(folder / "model.py"), ("vae",), parse_cluster("2:cpu"))
    manifest = Manifest((tuple(CLIPS_OF_A_STEP),), folder / "clips.jsonl")
    with captured_once():
        first, second = (lead(given, manifest, output, 3, encode).encoded for _ in range(2))
    return first, second


def test_a_rank_that_hangs_in_a_video_is_named_with_it(tmp_path: Path) -> None:
    given = encoding(tmp_path)
    files = files_of(given, tmp_path / "latents")
    with captured_once():
        plan = encoding_plan(given, files.missing(CLIPS_OF_A_STEP), files.folder / "plan", batch=3)
    told = run_ranks(2, _told_while_encoding, plan, files)
    doing = [text for own in told for text, _ in own]
    assert {name for text in doing for name in re.findall(r"\(clip (\w)\)", text)} == set("abcd"), doing
    assert all(5 < limit < 10 for own in told for _, limit in own)


def _told_while_encoding(plan: Path, files: EncodedFiles) -> list[tuple[str, float]]:
    """What the watchdog is told of this rank while an encoder runs, and for how long it may."""
    now: list[Progress] = []
    told: list[tuple[str, float]] = []

    def enter(phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None) -> None:
        now[:] = [] if progress is None else [progress]

    def watched(encoder: torch.nn.Module, values: list[torch.Tensor]) -> torch.Tensor:
        place = now[0].place()
        assert place.limit is not None
        told.append((place.doing, place.limit))
        return encode_loaded(encoder, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caching_rank, "encode_loaded", watched)
        encode_batches(read_executable(plan), files, None, torch.device("cpu"), enter, Timeouts(stall=5.0))
    return told


def test_a_host_that_does_not_see_the_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arachnec.runtime.agreement.share_text", lambda text: "an identity")
    with pytest.raises(UserError, match=r"rank 3 does not see in .*latents what rank 0 wrote there"):
        follow(3, tmp_path / "latents", lambda plan, files: None)


def _plain(given: Encoding, c: VideoClip) -> torch.Tensor:
    assert given.model_file.encoders is not None
    torch.manual_seed(0)
    encoder = given.model_file.encoders()["vae"]
    with torch.no_grad():
        return encoder(encoder.load(c, "cpu"))  # type: ignore[operator, no-any-return]


def test_clips_that_cannot_be_read_are_set_aside_by_name(tmp_path: Path) -> None:
    given = encoding(tmp_path, BROKEN.format(broken={"b"}))
    files = files_of(given, tmp_path / "latents")
    plan = encoded_on_ranks(given, files, CLIPS_OF_A_STEP)
    assert json.loads((plan / SET_ASIDE).read_text()) == {"clip": 1, "reason": "b.mp4 is damaged"}
    assert [c.id for c in files.missing(CLIPS_OF_A_STEP)] == ["b"]


def test_a_changed_model_file_video_or_caption_is_another_file(tmp_path: Path) -> None:
    given, other = encoding(tmp_path), encoding(tmp_path / "other", "\n# changed")
    video = tmp_path / "v.mp4"
    video.write_bytes(b"1")
    base = replace(CLIPS_OF_A_STEP[0], path=video, caption="x")
    paths = {files_of(given, tmp_path).path("vae", base), files_of(other, tmp_path).path("vae", base)}
    paths |= {files_of(given, tmp_path).path("vae", c) for c in (replace(base, caption="y"), replace(base, start=1))}
    video.write_bytes(b"12")
    paths.add(files_of(given, tmp_path).path("vae", base))
    assert len(paths) == 5


def test_where_no_clip_can_be_encoded_that_is_one_message(tmp_path: Path) -> None:
    given = encoding(tmp_path)

    def fails(given: Encoding, files: EncodedFiles, plan: Path) -> None:
        rows = [{"clip": number, "reason": "it is damaged"} for number in range(4)]
        (plan / SET_ASIDE).write_text("".join(json.dumps(row) + "\n" for row in rows))

    with captured_once(), pytest.raises(UserError) as raised:
        listed(given, CLIPS_OF_A_STEP, tmp_path / "latents", fails)
    assert "none of the clips could be encoded: clip a: it is damaged" in render(raised.value.diagnostics[0])
    assert not (tmp_path / "latents" / CLIPS).exists()


class Tokenizer:
    def __call__(self, caption: str, **options: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, 4), "attention_mask": torch.ones(1, 4)}


def test_captions_that_were_encoded_beforehand_are_not_dropped(tmp_path: Path) -> None:
    text = TextEncoder(Tokenizer(), torch.nn.Linear(1, 1))
    encoders = {"text": text, "vae": VideoEncoder(torch.nn.Linear(1, 1))}
    c = replace(clip("a", 2), caption="x", cached={"vae": tmp_path})
    demand_captions_read(0.1, [c], encoders)
    demand_captions_read(0.0, [replace(c, cached={"text": tmp_path})], encoders)
    with pytest.raises(UserError, match="`text` has encoded them beforehand"):
        demand_captions_read(0.1, [replace(c, cached={"text": tmp_path, "vae": tmp_path})], encoders)


def test_files_of_a_manifest_must_be_there_and_alike(tmp_path: Path) -> None:
    sizes = {"frames": 1, "height": 16, "width": 16, "text_tokens": 0}
    (tmp_path / "here.safetensors").touch()
    place = tmp_path / "clips.jsonl"
    place.write_text(json.dumps({**sizes, "encoded": {"vae": "gone.safetensors"}}))
    with pytest.raises(UserError, match="gone"):
        read_manifest(place)
    place.write_text(json.dumps({**sizes, "encoded": ["here.safetensors"]}))
    with pytest.raises(UserError, match="an object of encoders and files"):
        read_manifest(place)
    rows = [{**sizes, "encoded": {"vae": "here.safetensors"}}, sizes]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="clip `1` has nothing encoded beforehand"):
        encoded_beforehand(read_manifest(place).clips)
    with pytest.raises(UserError, match="cannot be read"):
        read_encoded(read_manifest(place).clips[0])
    assert Training().caption_dropout == 0
