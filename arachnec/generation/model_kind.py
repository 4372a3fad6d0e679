"""Which models of a sampler file are one to a tracer: experts of one structure that are called alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from arachnec.data.clip import VideoClip
from arachnec.models.sampler_file import SamplerFile
from arachnec.tracing.find import structure
from arachnec.tracing.record import form_of_call
from arachnec.tracing.sample import arguments_of, meta_encoders


def model_kind(sampler: SamplerFile, name: str, clips: Sequence[VideoClip]) -> Hashable:
    """Equal for models of one structure that are called alike; the name of one that cannot be built or called so."""
    file = sampler.model_file(name)
    try:
        with torch.device("meta"):
            model = sampler.build(name)
        encoders = meta_encoders(file)
        shapes = {clip.shape: clip for clip in clips}.values()
        calls = [arguments_of(file, clip, encoders, device="meta") for clip in shapes]
    except Exception:
        return name  # tracing says what is wrong, and where
    return structure(model), tuple(form_of_call(call) for call in calls)
