"""How many text tokens captions have. In: a model file. Out: clips whose captions are counted as the model's pipeline
tokenizes them.

A text encoder counts with its tokenizer, a pretrained folder without encoders with its own; where there is neither,
bytes are counted. What a pipeline cuts is cut here, so that what is planned is what runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from arachnec.data.clip import VideoClip, caption_tokens
from arachnec.data.manifest import Manifest
from arachnec.ir.diagnostic import counted, user_error
from arachnec.models.file import ModelFile

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Tokenization:
    """How a pipeline makes tokens of captions: with a ``tokenizer``, of a caption that it tidies, at most ``most`` of
    them. The first ``crop`` are a template's and are not counted. ``padded``: all captions have ``most``, since their
    padding is a token like others."""

    tokenizer: Any
    tidy: Callable[[str], str] = str
    most: int | None = None
    crop: int = 0
    padded: bool = False

    def count(self, caption: str) -> int:
        """The caption's tokens; more than ``most`` where the pipeline cuts it."""
        tokens = len(self.tokenizer(self.tidy(caption))["input_ids"]) - self.crop
        return max(tokens, self.most) if self.padded and self.most is not None else max(1, tokens)


@dataclass
class CaptionCounter:
    """Counts the text tokens of clips that no manifest counted, for one model file.

    ``refuse``: a caption that is too long is an error, and not cut. It remembers how many were.
    """

    model_file: ModelFile
    refuse: bool = False
    cut: int = field(default=0, init=False)
    longest: int = field(default=0, init=False)  # tokens of a caption that was cut

    @cached_property
    def _rules(self) -> tuple[list[Tokenization], int | None]:
        """What tokenizes captions, and the most tokens that the model takes."""
        adapter: Any = getattr(inspect.unwrap(self.model_file.sample), "__self__", None)
        rules = [] if self.model_file.encoders is None else _of_encoders(self.model_file.encoders)
        if not rules:
            rules = _tokenizations([adapter])
        limits = [rule.most for rule in rules] + [getattr(adapter, "text_length", None)]
        return rules, min((limit for limit in limits if limit is not None), default=None)

    def tokens(self, captions: Sequence[str]) -> int:
        """Tokens of the longest of a clip's captions, not cut."""
        rules, _ = self._rules
        counts = (rule.count for rule in rules) if rules else (caption_tokens,)
        return max(count(caption) for count in counts for caption in captions)

    def clip(self, clip: VideoClip) -> VideoClip:
        """The clip with its captions counted, where they are to be. Raises ``UserError`` for one that is too long and
        may not be cut."""
        if not clip.counted or not clip.texts:
            return clip
        tokens, (_, most) = self.tokens(clip.texts), self._rules
        if most is not None and tokens > most:
            if self.refuse:
                raise user_error(
                    f"the caption of clip `{clip.name}` has {tokens} text tokens, and the model takes {most}",
                    help="shorten the caption, or leave out `long_captions`: it is cut then, as the pipeline does it",
                )
            self.cut, self.longest, tokens = self.cut + 1, max(self.longest, tokens), most
        return replace(clip, text_tokens=tokens, counted=False)

    def manifest(self, manifest: Manifest) -> Manifest:
        """The manifest with all of its clips counted."""
        if not any(clip.counted and clip.texts for clip in manifest.clips):
            return manifest
        return replace(manifest, iterations=tuple(tuple(map(self.clip, clips)) for clips in manifest.iterations))

    @property
    def notes(self) -> list[str]:
        """What a person should know of captions that were cut."""
        if not self.cut:
            return []
        have = f"{counted(self.cut, 'caption')} of more than {self._rules[1]} text tokens"
        cut = "is cut" if self.cut == 1 else "are cut"
        return [f'note: {have} {cut}, the longest of {self.longest}; `long_captions = "refuse"` refuses them']


def _of_encoders(build: Callable[[], dict[str, torch.nn.Module]]) -> list[Tokenization]:
    """The tokenizations of text encoders, which are built without memory for it."""
    import torch

    with torch.device("meta"):
        encoders = build()
    return _tokenizations(encoders.values())


def _tokenizations(owners: Iterable[object]) -> list[Tokenization]:
    rules = (getattr(owner, "tokenization", None) for owner in owners)
    return [rule for rule in rules if isinstance(rule, Tokenization)]
