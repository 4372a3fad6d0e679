"""Small text encoders of transformers, of the kinds that video pipelines have: the heads are what ranks divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS, TOKENS = 300, 11


def umt5() -> Any:
    """Wan's kind: a relative bias in every block, gated GELU."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(vocab_size=WORDS, d_model=24, d_kv=4, d_ff=36, num_layers=2, num_heads=6))


def t5() -> Any:
    """CogVideoX's kind: one relative bias that all blocks share."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"vocab_size": WORDS, "d_model": 24, "d_kv": 4, "d_ff": 36, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, feed_forward_proj="gated-gelu")
    return T5EncoderModel(config)


def clip_text() -> Any:
    """HunyuanVideo's second: causal, biases, layer norms, learned positions."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=WORDS, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        max_position_embeddings=TOKENS, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return CLIPTextModel(config)


def llama() -> Any:
    """HunyuanVideo's first: grouped keys, rotation, SwiGLU, RMS norms."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4,
    )  # fmt: skip
    return LlamaModel(config)


def encoder(name: str) -> nn.Module:
    """As a model file has it, its weights spread so that each of them matters."""
    from arachnec.models.encoders import TextEncoder

    model = {"umt5": umt5, "t5": t5, "clip": clip_text, "llama": llama}[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.is_meta:
            nn.init.normal_(parameter, std=0.3)
    return TextEncoder(None, model)


def captions() -> Tensor:
    """Two loaded captions, one of them padded."""
    ids = torch.arange(2 * TOKENS).mul(37).remainder(WORDS).view(2, TOKENS)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, 8:] = 0
    return torch.stack([ids, mask], 1)
