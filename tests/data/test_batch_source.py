"""Datasets of other people: what is drawn of them, and what is said of one that does not keep its word."""

from __future__ import annotations

import gc
import io
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arachnec.data.batch_source import BatchSource
from arachnec.data.clip import VideoClip
from arachnec.data.dataset import from_text, to_text
from arachnec.ir.diagnostic import UserError, render


def item(frames: int = 3, **more: Any) -> dict[str, Any]:
    return {"frames": frames, "height": 16, "width": 16, "text_tokens": 0, **more}


def all_of(source: BatchSource) -> list[tuple[VideoClip, ...]]:
    batches = []
    while (clips := source.draw()) is not None:
        batches.append(clips)
    return batches


@given(count=st.integers(1, 20), batch=st.integers(1, 7))
def test_every_clip_is_drawn_once_whatever_a_batch_holds(count: int, batch: int) -> None:
    batches = all_of(BatchSource([item(n + 1) for n in range(count)], batch))
    assert [clip.frames for clips in batches for clip in clips] == list(range(1, count + 1))
    assert [clip.id for clips in batches for clip in clips] == list(range(count))
    assert all(len(clips) == batch for clips in batches[:-1])


@given(steps=st.integers(1, 9))
def test_a_replayed_source_has_the_digest_of_the_one_that_went_on(steps: int) -> None:
    data = [[item(n)] for n in range(1, 5)]
    source, again = BatchSource(data, repeat=True), BatchSource(data, repeat=True)
    for _ in range(steps):
        source.draw()
    again.restore(steps, source.clips, source.digest, "")
    assert (again.clips, again.digest) == (source.clips, source.digest)
    assert again.peek() is not None and again.digest == source.digest
    assert [c.frames for c in again.draw() or ()] == [c.frames for c in source.draw() or ()]


class Short:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}[index] if index > 8 else [item()] if index < 2 else [].__getitem__(index)  # type: ignore[index,return-value]


class Endless:
    def __getitem__(self, index: int) -> dict[str, Any]:
        return item()


class Lengthless(Endless):
    def __len__(self) -> int:
        raise OSError("no index file")


def leaving() -> Iterator[Any]:
    yield [item()]
    sys.exit(5)


def running_out() -> Iterator[Any]:
    yield [item()]
    yield next(iter(()))


def raising() -> Iterator[Any]:
    yield [item()]
    raise ValueError("no such column")


def raising_inside_a_batch() -> Iterator[Any]:
    yield from (item(), item())
    raise ValueError("no such column")


@pytest.mark.parametrize(
    ("batches", "batch", "expected"),
    [
        pytest.param(Short(), None, "announced 5 items and ended after 2 items", id="ends-early"),
        pytest.param(Endless(), 2, "with __getitem__ and without __len__, which cannot be drawn from", id="no-length"),
        pytest.param([item()], None, "a single clip, and nothing says how many make a batch", id="no-batch"),
        pytest.param([[item()]], 2, "a list of clips, and `batch` was given", id="batch-twice"),
        pytest.param([[item(id="a"), item(id="a")]], None, "two clips of one batch have the id `a`", id="same-id"),
        pytest.param([[3]], None, "item 0 of the dataset is a int", id="no-clip"),
        pytest.param([[item(hight=3)]], None, "unknown key `hight`", id="unknown-key"),
        pytest.param([[{"frames": 1}]], None, "the clip has no `height`", id="no-size"),
        pytest.param(raising(), None, "raised ValueError: no such column after 1 clip", id="raises"),
        pytest.param(raising_inside_a_batch(), 3, "no such column after 2 clips", id="raises-inside-a-batch"),
        pytest.param(iter(()), None, "the dataset gives no clips", id="empty"),
        pytest.param(
            [[item(9, video=torch.zeros(3, 5, 16, 16))]],
            None,
            "announces 9 x 16 x 16 and its `video` is 3 x 5 x 16 x 16",
            id="other-frames",
        ),
        pytest.param(
            [[item(latents=torch.zeros(1, 4, 2)), item(latents=torch.zeros(1, 4, 3))]],
            None,
            "announces 3 x 16 x 16 and its `latents` is 1 x 4 x 3",
            id="other-latents",
        ),
        pytest.param([None, item()], 2, "item 0 of the dataset is a NoneType", id="none"),
        pytest.param([[item()], None], None, "a single clip, and nothing says", id="no-batch"),
        pytest.param(Lengthless(), 2, "raised OSError: no index file after 0 clips", id="len-raises"),
        pytest.param(leaving(), None, "raised SystemExit: 5 after 1 clip", id="leaves"),
        pytest.param([[item(video=[[1.0]])]], None, "is a dict whose `video` is a list", id="list"),
        pytest.param([[item(more={"a": 1})]], None, "is a dict whose `more` is a dict", id="nested"),
        pytest.param([[item(json={"a": 1})]], None, '{**item.pop("json"), **item}', id="webdataset"),
        pytest.param([[item(caption=b"a cat")]], None, "to text", id="bytes-caption"),
        pytest.param([[item(video=np.array([None]))]], None, "`video` is a ndarray of object", id="objects"),
        pytest.param(
            [[item(x=torch.zeros(2, device="meta"))]], None, "`x` is a Tensor of torch.float32 on the", id="meta"
        ),
        pytest.param(
            [[item(id="a", x=torch.zeros(2)), item(id="b")]],
            None,
            "clip `b` has no tensors, and clip `a` has `x`",
            id="x",
        ),
    ],
)
def test_what_is_wrong_is_said_once(batches: Any, batch: int | None, expected: str) -> None:
    with pytest.raises(UserError) as told:
        all_of(BatchSource(batches, batch))
    assert len(told.value.diagnostics) == 1
    assert expected in render(told.value.diagnostics[0])


def test_a_generator_that_lets_a_stop_iteration_out_is_told_at_its_line() -> None:
    with pytest.raises(UserError, match="generator raised StopIteration after 1 clip") as told:
        all_of(BatchSource(running_out()))
    span = told.value.diagnostics[0].span
    assert span is not None
    assert (span.file, Path(__file__).read_text().splitlines()[span.line - 1].strip()) == (
        __file__,
        "yield next(iter(()))",
    )


class Undecodable(Short):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise ValueError("cannot decode this one")


def test_what_a_worker_of_a_loader_raises_is_told_at_the_datasets_line() -> None:
    loader = torch.utils.data.DataLoader(Undecodable(), batch_size=2, num_workers=1, collate_fn=list)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"raised ValueError: cannot decode this one after 0 clips$") as told:
        all_of(BatchSource(loader))
    span = told.value.diagnostics[0].span
    assert span is not None
    assert (Path(span.file).name, span.line) == (
        Path(__file__).name,
        Undecodable.__getitem__.__code__.co_firstlineno + 1,
    )


def test_workers_of_a_later_epoch_end_well_though_a_pools_thread_draws() -> None:
    data: Any = [item(n) for n in range(1, 4)]
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=1)
    source = BatchSource(loader, 1, repeat=True)
    workers: set[Any] = set()

    def drawn() -> int:
        clips = source.draw()
        workers.update(source._items._workers)  # type: ignore[union-attr]
        return 0 if clips is None else clips[0].frames

    source.begin()
    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(drawn).result() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    ended = [worker for worker in workers if not worker.is_alive()]
    assert len(workers) == 3
    assert [worker.exitcode for worker in ended] == [0, 0]


class Forgetful:
    """A dataset whose state cannot be asked or set."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[item()], [item()]])

    def state_dict(self) -> dict[str, int]:
        raise KeyError("place")

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("place")


def test_a_dataset_that_cannot_say_where_it_stands_is_told_at_its_line() -> None:
    source = BatchSource(Forgetful())
    for ask in (source.state, lambda: source.restore(1, 1, "digest", to_text({"place": 1}))):
        with pytest.raises(UserError, match="the dataset raised KeyError: 'place'") as told:
            ask()
        span = told.value.diagnostics[0].span
        assert span is not None
        assert span.file == __file__


# the loader leaves it to the interpreter to close its files
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_tar_shards_by_their_own_loader_and_one_that_is_cut_short(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    shard = tmp_path / "shard-0.tar"
    with tarfile.open(shard, "w") as tar:
        for name in ("first", "second"):
            for suffix, data in (("json", b'{"frames": 5, "height": 16, "width": 32}'), ("txt", b"a cat" * 400)):
                member = tarfile.TarInfo(f"{name}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    def drawn(path: Path) -> list[tuple[VideoClip, ...]]:
        loader = webdataset.WebDataset(str(path), shardshuffle=False).decode()
        return all_of(BatchSource(loader.map(lambda item: {"txt": item.pop("txt"), **item.pop("json"), **item}), 2))

    (clips,) = drawn(shard)
    assert [(clip.id, clip.shape) for clip in clips] == [(n, (5, 16, 32, 2001)) for n in ("first", "second")]
    short = tmp_path / "short-0.tar"
    for left, remedy in ((6000, "cut short or damaged"), (4608, "or its shard is cut short")):  # in a file, between two
        short.write_bytes(shard.read_bytes()[:left])
        with pytest.raises(UserError) as told:
            drawn(short)
        message = render(told.value.diagnostics[0])
        del told
        gc.collect()
        assert remedy in message


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_splits_a_dataset_over_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = [item(n) for n in range(1, 5)]
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler, collate_fn=list)
    with pytest.raises(UserError, match="whose sampler gives a rank one part in 2"):
        all_of(BatchSource(loader))
    webdataset = pytest.importorskip("webdataset")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with tarfile.open(tmp_path / "shard-0.tar", "w") as tar:
        member = tarfile.TarInfo("first.txt")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"a cat"))
    with pytest.raises(UserError) as told:
        all_of(BatchSource(webdataset.WebDataset(str(tmp_path / "shard-0.tar"), shardshuffle=False).decode(), 1))
    assert "give WebDataset nodesplitter=None" in render(told.value.diagnostics[0])


def test_a_datasets_state_is_text_and_back_and_an_object_is_refused_at_its_place() -> None:
    state = {"epoch": 2, "rng": torch.arange(3), 7: (1.5, None, b"xy"), "nested": {"list": [True, "a"]}}
    again = from_text(to_text(state))
    assert torch.equal(again.pop("rng"), torch.arange(3))
    assert again == {key: value for key, value in state.items() if key != "rng"}
    with pytest.raises(UserError, match="object"):
        to_text({"a": [object()]})
