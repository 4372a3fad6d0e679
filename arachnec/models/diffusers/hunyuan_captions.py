"""Captions as HunyuanVideo's pipeline encodes them: a language model's states behind a template, and CLIP's summary.

In: frozen transformers models and their tokenizers. Out: the encoders named ``text`` and ``pooled``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.models.caption_tokens import Tokenization
from arachnec.models.encoders import TextEncoder, no_caption_error

SKIPPED = 2  # layers of the language model, the last ones
POOLED_TOKENS = 77  # that CLIP sees of every caption


class TemplateEncoder(TextEncoder):
    """A causal language model that is given captions within a ``template``, which has ``{}`` in their place.

    The first ``crop`` tokens, which are the template's, are left out of what it gives.
    """

    def __init__(self, tokenizer: Any, model: nn.Module, template: str, crop: int, *, most: int | None = None) -> None:
        super().__init__(tokenizer, model, tidy=template.format, most=most)
        self.crop = crop

    @property
    def tokenization(self) -> Tokenization:
        return replace(super().tokenization, crop=self.crop)

    def length(self, clip: VideoClip) -> int:
        return self.crop + clip.text_tokens

    @torch.no_grad()
    def forward(self, loaded: Tensor) -> Tensor:
        """States ``[B, text_tokens, width]`` before the last layers; zero at padding, which the model's mask hides."""
        ids, mask = loaded.unbind(1)
        given = None if mask.is_meta else mask  # transformers looks at its values
        states = self.model(input_ids=ids, attention_mask=given, output_hidden_states=True).hidden_states
        hidden: Tensor = states[-(SKIPPED + 1)][:, self.crop :]
        return hidden * mask[:, self.crop :, None].to(hidden.dtype)


class PooledEncoder(nn.Module):
    """CLIP's text model: one vector a caption."""

    def __init__(self, tokenizer: Any, model: nn.Module) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.model = model.requires_grad_(False).eval()

    def load(self, clip: VideoClip, device: torch.device | str) -> Tensor:
        """int64 ``[1, 77]``: token ids. Raises ``UserError`` without a caption."""
        if torch.device(device).type == "meta":
            return torch.empty((1, POOLED_TOKENS), dtype=torch.int64, device=device)
        if clip.caption is None:
            raise no_caption_error(clip.name)
        tokens = self.tokenizer(
            clip.caption, padding="max_length", max_length=POOLED_TOKENS, truncation=True, return_tensors="pt"
        )
        ids: Tensor = tokens["input_ids"].to(device)
        return ids

    @torch.no_grad()
    def forward(self, loaded: Tensor) -> Tensor:
        """``[B, width]``."""
        pooled: Tensor = self.model(input_ids=loaded).pooler_output
        return pooled
