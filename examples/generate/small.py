"""The demo's small model, as it is trained."""

from codec import SHAPES, SMALL, TEXT, encoders  # noqa: F401

from arachnec.models.diffusers import wan

model = wan.text_to_video(text_length=TEXT, **SHAPES, **SMALL)
build, sample, loss = model.build, model.sample, model.loss
