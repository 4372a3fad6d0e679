"""The columns of a manifest: which key of a clip each is. In: a column's name. Out: its key, or where else it goes.

A key has its own name, those that public data sets give it, or the one that the user says (``--columns``). A column
that is no key goes to ``clip.values`` where public data sets have such columns, or where the user says so; any other is
a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from arachnec.ir.diagnostic import UserError, close_to, user_error
from arachnec.ir.nodes import Span

# Of several columns for one key the first with a value is taken.
NAMES: Mapping[str, tuple[str, ...]] = {
    "path": (
        *("path", "video", "video_path", "file_path", "file_name", "filepath", "filename", "file", "media_path"),
        *("relpath", "image", "image_path"),
    ),
    "caption": ("caption", "text", "prompt", "cap", "captions", "description"),
    "frames": ("frames", "num_frames", "frame", "n_frames", "frame_count"),
}
KEYS = (
    *("frames", "height", "width", "text_tokens", "caption", "path", "id", "clips", "iteration", "start", "encoded"),
    *("fps", "target_fps", "stride"),
    # How another system grouped these clips; read and not used, because partitioning is a pass.
    "micro_batch",
)
VALUES, FILES = "values", "files"  # where columns go that are no keys: as they are, or as paths
EVERY = "*"  # all columns that are no keys
RESOLUTION = "resolution"  # an object of height and width in some data sets, a number in others

_FILES = re.compile(r"(.+_)?(video|image|mask|audio|control|path|file)s?\d*")
_VALUES = re.compile(
    r"(unnamed.*)?|index|(.+_)?(scores?|ratio|url|id|timestamp|motion|quality|hash|category|tags?)|aes|aesthetics?|tech"
    r"|clarity|flow|ocr|nsfw|watermark|blur|duration|seconds|vid|videoid|youtubeid|source|dataset|split|license"
    r"|title|language|codec|bitrate|md5|sha256|type|media_type|file_size|(camera|main_object|background|style)_caption"
)
_JOINED = re.compile(r"(.+)_[xy]")  # a column that both tables had, as pandas' merge calls it


def bad_columns_error(given: str, reason: str, keys: str = ", ".join((*KEYS, VALUES, FILES))) -> UserError:
    return user_error(
        f"`{given}` does not say which columns are read: {reason}",
        help=f"write KEY=COLUMN, as in caption=prompt,path=video,values=*; the keys are {keys}",
    )


@dataclass(frozen=True)
class Columns:
    """What the user says of a manifest's columns: pairs of a key, ``values`` or ``files``, and a column."""

    named: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, text: str) -> Columns:
        """``caption=prompt,path=video`` as columns. Raises ``UserError``."""
        named: list[tuple[str, str]] = []
        for pair in filter(str.strip, text.split(",")):
            key, equals, column = (part.strip() for part in pair.partition("="))
            if not (key and equals and column):
                raise bad_columns_error(text, f"`{pair.strip()}` is no pair")
            if key not in (*KEYS, VALUES, FILES):
                raise bad_columns_error(text, f"there is no key `{key}`")
            if column == EVERY and key != VALUES:
                raise bad_columns_error(text, f"`{EVERY}` stands behind `{VALUES}=` only")
            if other := next((known for known, there in named if there == column), None):
                raise bad_columns_error(text, f"the column `{column}` is both `{other}` and `{key}`")
            named.append((key, column))
        return cls(tuple(named))

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that must be there."""
        return tuple(column for _, column in self.named if column != EVERY)

    def require_present(self, path: str, present: Mapping[str, object] | list[str]) -> None:
        """Raises ``UserError`` where a column that the user names is not among those of the manifest."""
        for column in self.required:
            if column not in present:
                columns_text = ", ".join(f"`{name}`" for name in present)
                raise user_error(
                    f"`{path}` has no column `{column}`, which --columns names", help=f"its columns are {columns_text}"
                )


@dataclass(frozen=True)
class RowKeys:
    """The keys that rows may have, their other names, and which of them are text or any number in a CSV file.

    ``extras``: columns that are no keys are allowed, as ``columns`` and this file say; without, they are mistakes.
    """

    keys: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    texts: tuple[str, ...] = ("caption", "path")
    fractions: tuple[str, ...] = ()
    counts: tuple[str, ...] = (
        "frames",
        "height",
        "width",
        "text_tokens",
        "clips",
        "start",
        "stride",
    )  # written 33.0, too
    extras: bool = False
    columns: Columns = Columns()

    def place(self, name: str) -> tuple[str, int] | None:
        """The key of a column, ``values`` or ``files``, and its rank among the columns of that key, the first lowest.

        None for a column that is not known.
        """
        if name not in self._places:
            self._places[name] = self._place(name)
        return self._places[name]

    @cached_property
    def _places(self) -> dict[str, tuple[str, int] | None]:
        return {}

    @cached_property
    def _known(self) -> dict[str, tuple[str, int]]:
        known = {key: (key, 0) for key in (*self.keys, *((VALUES, FILES) if self.extras else ()))}
        return known | {other: (key, n) for key, others in self.names.items() for n, other in enumerate(others)}

    def _place(self, name: str) -> tuple[str, int] | None:
        for rank, (key, column) in enumerate(self.columns.named):
            if column == name:
                return key, rank
        plain = re.sub(r"[\s-]+", "_", name.strip().lower())
        place = self._known.get(plain)
        if place is not None and place[0] not in {key for key, _ in self.columns.named}:
            return place
        if not self.extras:
            return None
        joined = _JOINED.fullmatch(plain)
        if place is not None or (joined is not None and joined[1] in self._known):
            return (FILES if plain in self.names["path"] else VALUES), 0
        if _FILES.fullmatch(plain):
            return FILES, 0
        if plain == RESOLUTION or _VALUES.fullmatch(plain) or (VALUES, EVERY) in self.columns.named:
            return VALUES, 0
        return None

    def ordered(self, present: list[str]) -> dict[str, list[str]]:
        """Of every key that is there the columns, the first to be taken first."""
        places = sorted(
            (place[1], place[0], name != name.lower(), name)
            for name in present
            if (place := self.place(name)) is not None
        )
        by_key: dict[str, list[str]] = {}
        for _, key, _, name in places:
            by_key.setdefault(key, []).append(name)
        return by_key

    def require_place(self, name: str, span: Span) -> tuple[str, int]:
        """As ``place``. Raises ``UserError`` for a column that is not known."""
        place = self.place(name)
        if place is not None:
            return place
        others = [other for names in self.names.values() for other in names]
        near = close_to(name, self.keys) or close_to(name, others)
        suggestion = f"did you mean `{near[0]}`?" if near else f"the keys are {', '.join(self.keys)}"
        if self.extras:
            taken = f" --columns {self._known[near[0]][0]}={name} reads it as that," if near else "; --columns"
            suggestion += f"{taken} {VALUES}={name} gives it to `sample`, in `clip.values`"
        raise user_error(f"unknown key `{name}`", label="no such key", help=suggestion, span=span)


CLIP_KEYS = RowKeys(KEYS, NAMES, fractions=("fps", "target_fps"), extras=True)
