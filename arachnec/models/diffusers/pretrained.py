"""The encoders of a Diffusers pipeline's folder. In: the folder. Out: encoders without weights, which --init reads.

Captions are encoded as the pipeline does it: Wan tidies them, and pads with zeros, which the text encoder does not
see; CogVideoX takes them as they are, and its text encoder sees the padding. HunyuanVideo has a template, states below
the last layers, and a pooled embedding beside them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.models.caption_tokens import Tokenization
from arachnec.models.diffusers.common import constructor
from arachnec.models.diffusers.tokenizations import TEMPLATE, cogvideox_tokens, hunyuan_tokens, tokenizer_of, wan_tokens
from arachnec.models.encoders import TextEncoder, VideoEncoder, no_caption_error
from arachnec.models.initial_weights import INDEX, PIPELINE, read_config, read_json_object

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


LANGUAGE_MODEL_ON_META = (5, 4)  # the first version of transformers whose Llama opens no autocast there


def no_pipeline_error(folder: str, part: str) -> UserError:
    return user_error(
        f"{folder} is no pipeline's folder: it has no {part}",
        help="give the folder with model_index.json, vae/, text_encoder/ and tokenizer/, by an absolute path",
    )


def pipeline_encoders(
    folder: str | Path,
    multiple: int = 16,
    *,
    text_dtype: torch.dtype = torch.bfloat16,
    text_length: int | None = None,
) -> dict[str, nn.Module]:
    """``encoders()`` of a model file: ``vae``, ``text`` and, of HunyuanVideo, ``pooled``, made from their configs.
    Their weights are as drawn; ``--init`` reads them from its own folder, or from this one where that has none.

    ``multiple`` is an adapter's ``geometry.multiple``; ``text_length`` is the most text tokens that a caption has, by
    default the pipeline's: longer ones are cut. The VAE stays in fp32. Raises ``UserError`` where the folder
    lacks a part, is of a pipeline that encodes captions in a way of its own, or needs a newer transformers.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise no_pipeline_error(str(folder), INDEX)
    pipeline = read_json_object(folder / INDEX).get("_class_name")
    if pipeline not in CAPTIONS:
        raise user_error(
            f"how {pipeline} encodes captions is not known here",
            help=(
                f"known are {', '.join(CAPTIONS)}; write encoders() with a module of your own that has load() and "
                "forward(): docs/your_model.md"
            ),
        )
    parts = ("text_encoder_2", "tokenizer_2") if pipeline == "HunyuanVideoPipeline" else ()
    for part in ("vae", "text_encoder", "tokenizer", *parts):
        if not (folder / part).is_dir():
            raise no_pipeline_error(str(folder), f"{part}/")
    config = read_config(folder / "vae")
    kind = constructor("diffusers", config["_class_name"])
    encoders = {
        "vae": VideoEncoder(kind.from_config(config), multiple),
        **CAPTIONS[pipeline](folder, text_dtype, text_length),
    }
    for encoder in encoders.values():
        setattr(encoder, PIPELINE, folder.absolute())
    return encoders


def _wan(folder: Path, dtype: torch.dtype, length: int | None) -> dict[str, nn.Module]:
    rule = wan_tokens(folder, length)
    return {"text": TextEncoder(rule.tokenizer, _text_model(folder, dtype), tidy=rule.tidy, most=rule.most)}


def _cogvideox(folder: Path, dtype: torch.dtype, length: int | None) -> dict[str, nn.Module]:
    rule = cogvideox_tokens(folder, length)
    return {"text": TextEncoder(rule.tokenizer, _text_model(folder, dtype), masked=False, most=rule.most)}


def _hunyuan_video(folder: Path, dtype: torch.dtype, length: int | None) -> dict[str, nn.Module]:
    version = importlib.import_module("transformers").__version__
    if constructor("packaging.version", "Version")(version).release < LANGUAGE_MODEL_ON_META:
        raise user_error(
            f"HunyuanVideo's captions need transformers {'.'.join(map(str, LANGUAGE_MODEL_ON_META))}, and {version} "
            "is installed",
            help=(
                "pip install -U transformers diffusers peft: memory and time are planned by running the language "
                "model without values, which older ones cannot"
            ),
        )
    template, rule = importlib.import_module(TEMPLATE).DEFAULT_PROMPT_TEMPLATE, hunyuan_tokens(folder, length)
    text = TemplateEncoder(rule.tokenizer, _text_model(folder, dtype), template["template"], rule.crop, most=rule.most)
    return {"text": text, "pooled": PooledEncoder(tokenizer_of(folder, "_2"), _text_model(folder, dtype, "_2"))}


# How a pipeline encodes captions.
CAPTIONS: dict[str, Callable[[Path, torch.dtype, int | None], dict[str, nn.Module]]] = {
    "WanPipeline": _wan,
    "CogVideoXPipeline": _cogvideox,
    "HunyuanVideoPipeline": _hunyuan_video,
}


def _text_model(folder: Path, dtype: torch.dtype, number: str = "") -> Any:
    config = constructor("transformers", "AutoConfig").from_pretrained(folder / f"text_encoder{number}")
    return constructor("transformers", config.architectures[0])(config).to(dtype)
