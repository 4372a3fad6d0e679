"""Fine-tune adapters of low rank (Hu et al., "LoRA", arXiv 2106.09685) on the Wan2.1 pipeline in a local folder."""

from peft import LoraConfig

from arachnec.models.diffusers import wan
from arachnec.models.diffusers.pretrained import pipeline_encoders

FOLDER = "finetune-output/pretrained"  # yours: an absolute path, such as /data/Wan2.1-T2V-1.3B-Diffusers
model = wan.text_to_video(FOLDER)
sample, loss = model.sample, model.loss


def build():
    transformer = model.build().requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return transformer


def encoders():
    return pipeline_encoders(FOLDER, model.geometry.multiple)
