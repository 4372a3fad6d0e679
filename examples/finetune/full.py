"""Fine-tune every weight of the Wan2.1 pipeline in a local folder."""

from arachnec.models.diffusers import wan
from arachnec.models.diffusers.pretrained import pipeline_encoders

FOLDER = "finetune-output/pretrained"  # yours: an absolute path, such as /data/Wan2.1-T2V-1.3B-Diffusers
model = wan.text_to_video(FOLDER)
build, sample, loss = model.build, model.sample, model.loss


def encoders():
    return pipeline_encoders(FOLDER, model.geometry.multiple)
