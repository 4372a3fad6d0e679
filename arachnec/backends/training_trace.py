"""A model traced as it is trained: in the precision of its options, with the state of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from arachnec.backends.cascade_step import in_training_precision, trained_parameters
from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_beforehand
from arachnec.data.header_check import hold_against_headers
from arachnec.data.manifest import Manifest, read_manifest
from arachnec.executable.other_manifests import validation_text
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import user_error
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Module
from arachnec.models.file import ModelFile
from arachnec.optimizers.kept_state import demand_whole_tensors, recipe_for, with_optimizer
from arachnec.passes.trace import Trace, trace_model
from arachnec.tracing.sample import meta_encoders
from arachnec.tracing.sample_reads import demand_captions_read, demand_own_generator, demand_timesteps_read

LOOKED_AT = 100  # clips of training that are to have a key
KEYS: Mapping[str, Callable[[VideoClip], bool]] = {
    "`path`": lambda clip: clip.path is not None,
    "`path` of latents (.safetensors)": lambda clip: clip.path is not None and clip.path.suffix == ".safetensors",
    "`caption`": lambda clip: clip.caption is not None,
    "tensors": lambda clip: bool(clip.tensors),
}


def training_trace(
    model_file: ModelFile,
    clips: Sequence[VideoClip],
    training: Training,
    *,
    gpu: bool = False,
    reporter: Reporter = unreported,
) -> Trace:
    """``gpu``: memory is that of a GPU's kernels. Where the model file has encoders, clips are held against the headers
    of their videos, where these are here: before tracing by the manifest's words, and then, one clip of each shape, by
    what the encoders can take.

    Raises ``UserError``.
    """
    notes = [] if model_file.encoders is None else hold_against_headers(clips)
    traced = trace_model(in_training_precision(model_file, training), clips, gpu=gpu, reporter=reporter)
    _hold_against_headers(traced, clips)
    encoders = meta_encoders(model_file)
    demand_timesteps_read(model_file, training.timesteps, clips[0], encoders, model_file.span("sample"))
    demand_own_generator(model_file, clips, encoders, model_file.path, model_file.span("sample"))
    demand_captions_read(training.caption_dropout, clips, encoders)
    model = traced.counter.model
    recipe = recipe_for(trained_parameters(model), model_file, training)
    stages = (with_optimizer(s, model, training, recipe) if s.trained else s for s in traced.stages)
    return replace(traced, stages=tuple(stages), limits=(*notes, *traced.limits))


def validation_manifest(clips: Sequence[VideoClip], training: Training) -> Manifest | None:
    """The options' validation manifest, beside the ``clips`` of training; None without one. Raises ``UserError``."""
    if training.validation.data is None:
        return None
    manifest = read_manifest(training.validation.data, columns=training.columns)
    encoded_beforehand([clips[0], *manifest.clips])  # all or none, in training and here
    for key, has in KEYS.items():
        if all(has(clip) for clip in islice(clips, LOOKED_AT)):
            for clip in manifest.clips:
                if not has(clip):
                    raise user_error(
                        f"held-back clip `{clip.name}` of {manifest.path} has no {key}, and the clips of training have",
                        help="its loss would be another thing: give held-back clips what those of training have",
                    )
    return manifest


def validation_of(trace: Trace, manifest: Manifest | None) -> str:
    """A validation manifest as an executable has it; empty without one. Raises ``UserError``."""
    if manifest is None:
        return ""
    _hold_against_headers(trace, manifest.clips)
    return validation_text(manifest.iterations, trace.tokens)


def demand_optimizer_fits(trace: Trace, model: Module, model_file: ModelFile, training: Training) -> None:
    """Raises ``UserError`` where the passes of scope ``model`` deal out what the optimizer needs whole."""
    demand_whole_tensors(model, recipe_for(trained_parameters(trace.counter.model), model_file, training))


def _hold_against_headers(traced: Trace, clips: Sequence[VideoClip]) -> None:
    for clip in {clip.shape: clip for clip in clips if clip.path is not None and clip.path.is_file()}.values():
        for encoder in traced.counter.encoders.values():
            check = getattr(encoder, "check", None)
            if check is not None:
                check(clip)
