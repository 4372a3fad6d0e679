"""How the pipelines of pretrained folders make tokens of captions. In: a folder. Out: its tokenizer and rule.

Wan tidies captions, and hides their padding; CogVideoX's padding is seen, so every caption has all tokens;
HunyuanVideo's captions stand in a template.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arachnec.models.caption_tokens import Tokenization
from arachnec.models.diffusers.common import constructor
from arachnec.models.initial_weights import INDEX, read_config, read_json_object


def wan_prompt(caption: str) -> str:
    """As ``WanPipeline``: broken characters mended where ftfy is installed, HTML's entities read, one space between
    words."""
    if importlib.util.find_spec("ftfy") is not None:
        caption = importlib.import_module("ftfy").fix_text(caption)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()


TEMPLATE = "diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video"
WAN_TOKENS, COGVIDEOX_TOKENS, HUNYUAN_TOKENS = 512, 226, 256  # the most that the pipelines take


class OfFolder:
    """An adapter that may have its configuration from the ``folder`` of pretrained weights."""

    folder: Path | None

    @property
    def tokenization(self) -> Tokenization | None:
        """How the pipeline of the folder, or the one that it is a part of, makes tokens of captions; None where it is
        no pipeline's, or not one of those known here. No text encoder is made."""
        places = () if self.folder is None else (self.folder, self.folder.parent)
        place = next((place for place in places if (place / INDEX).is_file()), None)
        if place is None or not (place / "tokenizer").is_dir():
            return None
        rule = TOKENIZATIONS.get(str(read_json_object(place / INDEX).get("_class_name")))
        return None if rule is None else rule(place, None)


def wan_tokens(folder: Path, length: int | None) -> Tokenization:
    return Tokenization(tokenizer_of(folder), wan_prompt, length or WAN_TOKENS)


def cogvideox_tokens(folder: Path, length: int | None) -> Tokenization:
    stated = read_config(folder / "transformer").get("max_text_seq_length")
    most = length or (stated if isinstance(stated, int) else COGVIDEOX_TOKENS)
    return Tokenization(tokenizer_of(folder), most=most, padded=True)


def hunyuan_tokens(folder: Path, length: int | None) -> Tokenization:
    template = importlib.import_module(TEMPLATE).DEFAULT_PROMPT_TEMPLATE
    return Tokenization(
        tokenizer_of(folder), template["template"].format, length or HUNYUAN_TOKENS, template["crop_start"]
    )


TOKENIZATIONS: dict[str, Callable[[Path, int | None], Tokenization]] = {
    "WanPipeline": wan_tokens,
    "CogVideoXPipeline": cogvideox_tokens,
    "HunyuanVideoPipeline": hunyuan_tokens,
}


def tokenizer_of(folder: Path, number: str = "") -> Any:
    return constructor("transformers", "AutoTokenizer").from_pretrained(
        folder / f"tokenizer{number}", local_files_only=True
    )
