"""Somebody's dataset as global batches of clips.

In: any iterable of clips or of batches of clips, or a map-style dataset. Out: one batch after the other, each clip
checked against what it announced. A source remembers the digest of what was drawn, so that a resumed run can tell
whether it goes on with the same clips.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from arachnec.data.clip import VideoClip
from arachnec.data.dataset import bad_item_error, clip_of_item, dataset_raised, from_text, to_text
from arachnec.ir.diagnostic import UserError, counted, user_error

EMPTY = hashlib.sha256(b"").hexdigest()
END: Final = object()  # of a dataset: None may be an item of it, which is a mistake


def not_iterable_error(kind: str, remedy: str) -> UserError:
    return user_error(f"`batches` is a {kind}, which cannot be drawn from", help=remedy)


class BatchSource:
    """Draws batches. ``batch`` is how many clips make one, where the dataset gives single clips. With ``repeat`` a
    dataset that can be begun again is, as often as needed."""

    def __init__(
        self,
        batches: object,
        batch: int | None = None,
        *,
        repeat: bool = False,
        captions: Callable[[VideoClip], VideoClip] = lambda clip: clip,
    ) -> None:
        self._dataset = batches
        self._batch = batch
        self._repeat = repeat
        self.captions = captions  # counts the text tokens of a clip
        self._items: Iterator[Any] | None = None
        self._in_epoch = 0  # items of the dataset since it was begun
        self._ahead: list[tuple[VideoClip, ...]] = []
        self.batches = 0
        self.clips = 0
        self.digest = EMPTY
        self._given = 0  # clips that were made of items, for their numbers
        self._bare: str | int | None = None  # a clip that has nothing but its size
        self._full: VideoClip | None = None  # one with tensors
        self._like: dict[tuple[object, str], tuple[tuple[int, ...], str | int]] = {}  # by size and name: shape, clip

    def begin(self) -> None:
        """Make the dataset's iterator, in the thread that calls: a loader may start processes then."""
        if self._items is None:
            self._items = self._iterator()

    def peek(self) -> tuple[VideoClip, ...] | None:
        """The batch that ``draw`` will give next."""
        if not self._ahead:
            clips = self._next()
            if clips is None:
                return None
            self._ahead.append(clips)
        return self._ahead[0]

    def draw(self) -> tuple[VideoClip, ...] | None:
        """The next batch; None where there are no more. Raises ``UserError`` for what the dataset does wrong."""
        clips = self._ahead.pop() if self._ahead else self._next()
        if clips is not None:
            self.batches += 1
            self.clips += len(clips)
            rows = json.dumps([[str(clip.id), *clip.shape] for clip in clips])
            self.digest = hashlib.sha256(f"{self.digest}{rows}".encode()).hexdigest()
        return clips

    def state(self) -> str:
        """What the dataset says of its place, as text; empty where it says nothing.

        A batch that was only looked at counts as drawn in it, so nobody asks then.
        """
        if not self._keeps_state:
            return ""
        with self._told():
            state = self._dataset.state_dict()  # type: ignore[attr-defined]
        return to_text(state)

    def restore(self, batches: int, clips: int, digest: str, state: str) -> None:
        """Go to the place after so many batches: by the dataset's own ``state``, else by drawing them again."""
        if state and self._keeps_state:
            place = from_text(state)
            with self._told():
                self._dataset.load_state_dict(place)  # type: ignore[attr-defined]
            self.batches, self.clips, self.digest, self._given = batches, clips, digest, clips
            return
        while self.batches < batches and self.draw() is not None:
            pass

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the dataset raises is told as its own, at its line."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(dataset_raised(error, self.clips)) from error

    @property
    def _keeps_state(self) -> bool:
        return all(callable(getattr(self._dataset, name, None)) for name in ("state_dict", "load_state_dict"))

    def _next(self) -> tuple[VideoClip, ...] | None:
        self.begin()
        clips = self._grouped() if self._batch is not None else self._whole()
        if not clips:
            if not self._given and self._in_epoch == 0:
                raise user_error(
                    "the dataset gives no clips",
                    help="an iterator can be used up once only: give a new one, or the dataset itself",
                )
            return None
        seen: set[str] = set()
        for clip in clips:
            if str(clip.id) in seen:
                raise user_error(
                    f"two clips of one batch have the id `{clip.id}`",
                    help="ids seed a clip's noise and must differ; leave `id` out to have the clips counted",
                )
            seen.add(str(clip.id))
        return tuple(clips)

    def _grouped(self) -> list[VideoClip]:
        clips: list[VideoClip] = []
        assert self._batch is not None
        while len(clips) < self._batch:
            item = self._item(again=not clips)
            if item is END:
                break
            if isinstance(item, list | tuple):
                remedy = "leave `batch` out: the dataset itself says which clips make one"
                raise bad_item_error(self._given, "a list of clips, and `batch` was given", remedy)
            clips.append(self._clip(item))
        return clips

    def _whole(self) -> list[VideoClip]:
        item = self._item(again=True)
        if item is END:
            return []
        if not isinstance(item, list | tuple):
            remedy = "give Engine(..., batch=N): so many of them make a global batch"
            raise bad_item_error(self._given, "a single clip, and nothing says how many make a batch", remedy)
        if not item:
            raise bad_item_error(self._given, "a batch without clips", "give each batch at least one clip")
        return [self._clip(clip) for clip in item]

    def _clip(self, item: object) -> VideoClip:
        clip = self.captions(clip_of_item(item, self._given))
        self._given += 1
        self._demand_tensors(clip)
        for name, value in clip.tensors.items():
            shape = tuple(value.shape)
            before, other = self._like.setdefault((clip.shape, name), (shape, clip.id))
            if shape != before:
                announced, actual, expected = (" x ".join(map(str, sizes)) for sizes in (clip.shape[:3], shape, before))
                raise user_error(
                    f"clip `{clip.id}` announces {announced} and its `{name}` is {actual}",
                    help=f"`{name}` of clip `{other}`, of the same size, is {expected}: one of them is of another size",
                )
        return clip

    def _demand_tensors(self, clip: VideoClip) -> None:
        """Refuse a clip of which only the size is known beside one with tensors: it would be trained as zeros."""
        if clip.tensors:
            self._full = self._full or clip
        elif clip.path is None and not clip.cached and not clip.encoded and self._bare is None:
            self._bare = clip.id
        if self._full is not None and self._bare is not None:
            names = ", ".join(f"`{name}`" for name in self._full.tensors)
            raise user_error(
                f"clip `{self._bare}` has no tensors, and clip `{self._full.id}` has {names}",
                help="give every clip the same ones: without any, `sample` makes zeros to plan with",
            )

    def _item(self, *, again: bool) -> Any:
        """The dataset's next item; ``END`` at its end, after which ``again`` begins anew where it may."""
        assert self._items is not None
        try:
            item = next(self._items)
        except StopIteration:
            announced = self._length()
            if announced is not None and self._in_epoch < announced and not self._keeps_state:
                raise user_error(
                    f"the dataset announced {counted(announced, 'item')} and ended after "
                    f"{counted(self._in_epoch, 'item')}",
                    help="correct its __len__, or find what it leaves out; a checkpoint has what was trained so far",
                ) from None
            if not (again and self._repeat and self._in_epoch and not isinstance(self._dataset, Iterator)):
                return END
            self._items, self._in_epoch = _in_own_thread(self._iterator), 0
            return self._item(again=False)
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # it may run in a thread, which an exit would end unheard
            raise UserError(dataset_raised(error, self._given)) from error
        self._in_epoch += 1
        return item

    def _iterator(self) -> Iterator[Any]:
        dataset: Any = self._dataset
        kind = type(dataset).__name__
        if isinstance(dataset, str | bytes | Path | Mapping):
            raise not_iterable_error(kind, "give an iterable of clips; a manifest is run by `arachnec run`")
        parts = _parts(dataset)
        if parts > 1:
            remedy = "leave the sampler out: only rank 0 draws, for all ranks"
            raise not_iterable_error(f"{kind} whose sampler gives a rank one part in {parts}", remedy)
        if hasattr(dataset, "__iter__"):
            with self._told():
                return iter(dataset)
        if not hasattr(dataset, "__getitem__"):
            raise not_iterable_error(kind, "give an iterable, or a dataset with __getitem__ and __len__")
        length = self._length()
        if length is None:
            remedy = "give it a __len__: without one nobody knows how many clips it has"
            raise not_iterable_error(f"{kind} with __getitem__ and without __len__", remedy)
        return _by_index(dataset, length)

    def _length(self) -> int | None:
        try:
            return len(self._dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None
        except (Exception, SystemExit) as error:
            raise UserError(dataset_raised(error, self.clips)) from error


def _parts(loader: Any) -> int:
    """Among how many ranks a loader's sampler, such as torch's ``DistributedSampler``, divides its dataset."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    counts = [getattr(sampler, "num_replicas", 1) for sampler in samplers]
    return max(count for count in counts if isinstance(count, int))


def _in_own_thread(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """What ``make`` returns or raises, in a thread that does nothing else.

    A loader may fork workers. One that is forked in a pool's thread fails at its end, as Python 3.11 has it join the
    pool's threads, itself among them; torch then raises that in the main thread.
    """
    done: Future[Iterator[Any]] = Future()

    def run() -> None:
        try:
            done.set_result(make())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="next-epoch")
    thread.start()
    thread.join()
    return done.result()


def _by_index(dataset: Any, length: int) -> Iterator[Any]:
    for index in range(length):
        try:
            yield dataset[index]
        except IndexError:
            return
