"""HunyuanVideo (20 dual and 40 single blocks): the configuration of hunyuanvideo-community/HunyuanVideo."""

from arachnec.models.diffusers import hunyuan_video

model = hunyuan_video.text_to_video("HunyuanVideo")
build, sample, loss = model.build, model.sample, model.loss
