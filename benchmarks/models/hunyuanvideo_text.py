"""HunyuanVideo with text encoders as large as its own: a Llama of 8B, and CLIP's, whose pooled output is read.

For costs and plans. Its pipeline puts captions into a template and reads a layer below the last, which this does not.
"""

import torch
from transformers import ByT5Tokenizer, CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

from arachnec.models.diffusers import hunyuan_video
from arachnec.models.encoders import TextEncoder

model = hunyuan_video.text_to_video("HunyuanVideo", dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss

# text_encoder/config.json and text_encoder_2/config.json of hunyuanvideo-community/HunyuanVideo
LLAMA = LlamaConfig(
    vocab_size=128320, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
)  # fmt: skip
CLIP = CLIPTextConfig(
    vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
)


class Pooled(TextEncoder):
    def forward(self, loaded):
        return self.model(input_ids=loaded[:, 0]).pooler_output


def encoders():
    tokenizer = ByT5Tokenizer()
    return {
        "text": TextEncoder(tokenizer, LlamaModel(LLAMA).to(torch.bfloat16)),
        "pooled": Pooled(tokenizer, CLIPTextModel(CLIP).to(torch.bfloat16)),
    }
