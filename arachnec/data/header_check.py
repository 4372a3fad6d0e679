"""What a manifest says of clips, against what their videos show. Headers are read, and nothing but a first frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from arachnec.data.clip import VideoClip
from arachnec.data.video import RATE_TOLERANCE, VideoHeader, count_frames, frames_taken, read_header
from arachnec.ir.diagnostic import UserError, counted, user_error

MOST_OPENED = 256  # videos whose headers are read before a model is traced; of more, as many, evenly spaced
THREADS = 4
LISTED = 5  # clips that one message names
LARGEST_MULTIPLE = 64  # pixels: sizes may be rounded up to a multiple that only the model's encoder knows


def disagreement(clip: VideoClip, header: VideoHeader, multiple: int) -> tuple[str, str] | None:
    """Where a clip wants more than its video's header says, or calls its frame rate otherwise: the reason and a remedy.

    Sizes may be rounded up to a multiple. A video whose header states too few frames is counted before. Raises
    ``UserError`` for a video that cannot be read.
    """
    assert clip.path is not None
    taking = clip.path, clip.start, clip.target_fps, clip.stride
    available = frames_taken(*taking, header.frames)
    if available < clip.frames:
        available = frames_taken(*taking, count_frames(clip.path))
    if available < clip.frames:
        return _too_few(clip, available)
    if clip.height >= header.height + multiple or clip.width >= header.width + multiple:
        sizes = f"{clip.height} x {clip.width}", f"{header.height} x {header.width}"
        remedy = "give sizes that the video has, or leave out `height` and `width`: they are read from its header"
        return f"it is {sizes[0]}, and the video `{clip.path}` is {sizes[1]} (height x width)", remedy
    rates = [rate for rate in (header.fps, header.nominal_fps) if rate]
    if clip.fps and rates and not any(abs(clip.fps / rate - 1) <= RATE_TOLERANCE for rate in rates):
        remedy = "`fps` is the file's own rate: leave it out, and give `target_fps` for frames at another one"
        return f"its `fps` is {clip.fps:g}, and the video `{clip.path}` has {rates[0]:g} frames a second", remedy
    return None


def _too_few(clip: VideoClip, available: int) -> tuple[str, str]:
    if clip.target_fps is None and clip.stride == 1:
        reason = f"the video `{clip.path}` has {clip.start + available} frames, not {clip.start + clip.frames}"
        return reason, "take fewer frames or an earlier start"
    how = f"at {clip.target_fps:g} a second" if clip.target_fps else f"with a stride of {clip.stride}"
    reason = f"the video `{clip.path}` gives {available} frames {how} from frame {clip.start} on, not {clip.frames}"
    return reason, "take fewer frames, or leave out `frames`: they are counted as they are taken"


def hold_against_headers(clips: Iterable[VideoClip]) -> list[str]:
    """Hold clips against their videos, as far as these are here, and return notes of what a user should know.

    Of many videos ``MOST_OPENED`` are looked at. Raises one ``UserError`` that lists the first disagreements. A video
    that cannot be read is a note: its clips are skipped in their steps.
    """
    of_videos: dict[Path, list[VideoClip]] = {}
    for clip in clips:
        if clip.path is not None and clip.path.suffix != ".safetensors" and not clip.cached:
            of_videos.setdefault(clip.path, []).append(clip)
    here = [path for path in of_videos if path.is_file()]
    number = min(MOST_OPENED, len(here))
    chosen = [here[i * len(here) // number] for i in range(number)]
    with ThreadPoolExecutor(THREADS) as pool:
        looks = list(pool.map(lambda path: _look(path, of_videos[path]), chosen))
    wrong = [clip for look in looks for clip in look.wrong]
    if wrong:
        lines = [f"  clip `{id}`: {reason}" for id, reason, _ in wrong[:LISTED]] + ["  ..."] * (len(wrong) > LISTED)
        named = f"{counted(len(wrong), 'clip')} {'is' if len(wrong) == 1 else 'are'}"
        details = "\n".join(lines)
        raise user_error(
            f"{named} not as the manifest says ({number} videos were looked at):\n{details}", help=f"{wrong[0][2]}"
        )
    return _notes(looks, number, len(here))


@dataclass(frozen=True)
class _Look:
    """What is to be said of one video: of its clips id, reason and remedy; why it cannot be read."""

    wrong: tuple[tuple[str | int, str, str], ...] = ()
    unreadable: str = ""
    transparent: str | int | None = None


def _look(path: Path, clips: Sequence[VideoClip]) -> _Look:
    try:
        header = read_header(path)
        wrong = [(clip.name, disagreement(clip, header, LARGEST_MULTIPLE)) for clip in clips]
    except UserError as error:
        return _Look(unreadable=str(error))
    named = tuple((id, *reason) for id, reason in wrong if reason is not None)
    return _Look(named, transparent=clips[0].id if header.alpha else None)


def _notes(looks: Sequence[_Look], number: int, here: int) -> list[str]:
    notes = []
    if seen := [look.transparent for look in looks if look.transparent is not None]:
        first = f"(the first: clip `{seen[0]}`)"
        notes.append(f"{counted(len(seen), 'video')} with transparent pixels {first} will be laid on white")
    if broken := [look.unreadable for look in looks if look.unreadable]:
        notes.append(f"{counted(len(broken), 'video')} cannot be read, and will be skipped: {broken[0]}")
    if number < here:
        notes.append(f"{number} of {here} videos were held against the manifest")
    return notes
