"""The demo's large model, as it is trained."""

from codec import LARGE, SHAPES, TEXT, encoders  # noqa: F401

from arachnec.models.diffusers import wan

model = wan.text_to_video(text_length=TEXT, **SHAPES, **LARGE)
build, sample, loss = model.build, model.sample, model.loss
