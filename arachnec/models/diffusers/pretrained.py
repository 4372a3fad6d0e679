"""The encoders of a Diffusers pipeline's folder. In: the folder. Out: encoders without weights, which --init reads.

Captions are encoded as the pipeline does it: Wan tidies them, and pads with zeros, which the text encoder does not
see; CogVideoX takes them as they are, and its text encoder sees the padding. HunyuanVideo's uses a template and a layer
below the last, which ``TextEncoder`` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.models.diffusers.common import constructor
from arachnec.models.encoders import TextEncoder, VideoEncoder
from arachnec.models.initial_weights import read_config, read_json_object
from arachnec.models.prompts import wan_prompt

INDEX = "model_index.json"
# Whether the text encoder is told what is padding, and what is done to captions before.
CAPTIONS: dict[str, dict[str, Any]] = {
    "WanPipeline": {"masked": True, "tidy": wan_prompt},
    "CogVideoXPipeline": {"masked": False},
}


@dataclass(frozen=True)
class NoPipeline(Diagnostic):
    title: ClassVar[str] = "{folder} is no pipeline's folder: it has no {part}"
    help: ClassVar[str] = (
        "give the folder with model_index.json, vae/, text_encoder/ and tokenizer/, by an absolute path"
    )
    folder: str
    part: str


@dataclass(frozen=True)
class OtherPipeline(Diagnostic):
    title: ClassVar[str] = "how {pipeline} encodes captions is not known here"
    help: ClassVar[str] = (
        "known are {known}; write encoders() with a module of your own that has load() and forward(): "
        "docs/your_model.md"
    )
    pipeline: str
    known: str


def pipeline_encoders(
    folder: str | Path, multiple: int = 16, *, text_dtype: torch.dtype = torch.bfloat16
) -> dict[str, nn.Module]:
    """``encoders()`` of a model file: ``vae`` and ``text``, made from their configs, their weights as drawn.

    ``multiple`` is an adapter's ``geometry.multiple``. The VAE stays in fp32. Raises ``UserError`` where the folder
    lacks a part, or is of a pipeline that encodes captions in a way of its own.
    """
    folder = Path(folder)
    if not (folder / INDEX).is_file():
        raise UserError(NoPipeline(None, str(folder), INDEX))
    pipeline = read_json_object(folder / INDEX).get("_class_name")
    if pipeline not in CAPTIONS:
        raise UserError(OtherPipeline(None, str(pipeline), ", ".join(CAPTIONS)))
    for part in ("vae", "text_encoder", "tokenizer"):
        if not (folder / part).is_dir():
            raise UserError(NoPipeline(None, str(folder), f"{part}/"))
    config = read_config(folder / "vae")
    kind = constructor("diffusers", config["_class_name"])
    vae = kind.from_config(config)
    text = _text_model(folder / "text_encoder").to(text_dtype)
    tokenizer = constructor("transformers", "AutoTokenizer").from_pretrained(folder / "tokenizer")
    return {
        "vae": VideoEncoder(vae, multiple),
        "text": TextEncoder(tokenizer, text, **CAPTIONS[pipeline]),
    }


def _text_model(folder: Path) -> Any:
    config = constructor("transformers", "AutoConfig").from_pretrained(folder)
    return constructor("transformers", config.architectures[0])(config)
