"""Captions as a pipeline tidies them before its tokenizer sees them."""

from __future__ import annotations

import html
import importlib.util
import re


def wan_prompt(caption: str) -> str:
    """As ``WanPipeline``: broken characters mended where ftfy is installed, HTML's entities read, one space between
    words."""
    if importlib.util.find_spec("ftfy") is not None:
        caption = importlib.import_module("ftfy").fix_text(caption)
    return re.sub(r"\s+", " ", html.unescape(html.unescape(caption))).strip()
