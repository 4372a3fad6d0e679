"""The encoders of a rank, as the stages of a program say: whole, with a part of the weights, or on several ranks.

Where one is divided, or weights are read, every encoder is built or read one parameter at a time
(``streamed_weights``): no rank holds all weights of one that is divided at any moment, and each keeps its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import build_encoders
from arachnec.backends.torch_distributed.weights.shared_weights import shared_encoders
from arachnec.backends.torch_distributed.weights.streamed_weights import Offered, Take, put_kept, streamed
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Module
from arachnec.ir.tensor_parallel import divided_encoders
from arachnec.models.encoders import tiling_vae
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import EncoderWeights
from arachnec.spmd.spatial.division import Call, calls_of, encode_together
from arachnec.spmd.spatial.peers import Group
from arachnec.spmd.tensor_parallel.division import COLUMNS, WeightCuts, WeightPart, cuts_of, encode_with_parts
from arachnec.tracing.sample import meta_encoders


@dataclass
class DividedEncoders:
    """Knows, for every shape of clips, the tiles that an encoder makes of them: found once, on the meta device.

    ``parts`` are what this rank holds of encoders whose weights are divided, by encoder and by the weight's name.
    """

    parts: Mapping[str, Mapping[str, WeightPart]] = field(default_factory=dict)
    _meta: dict[str, nn.Module] = field(default_factory=dict)
    _calls: dict[tuple[object, ...], tuple[Call, ...]] = field(default_factory=dict)

    def encode(self, model_file: ModelFile, stage: str, encoder: nn.Module, loaded: Tensor, peers: Group) -> Tensor:
        """What the stage's ``encoder`` makes of a loaded clip, by all of these ranks, on each. Collective."""
        if stage in self.parts:
            return encode_with_parts(encoder, self.parts[stage], loaded, peers, len(peers.ranks))
        return encode_together(
            encoder, loaded, peers, len(peers.ranks), self._tiles(model_file, stage, encoder, loaded)
        )

    def _tiles(self, model_file: ModelFile, stage: str, encoder: nn.Module, loaded: Tensor) -> tuple[Call, ...]:
        if tiling_vae(encoder) is None:
            return ()
        key = stage, tuple(loaded.shape)
        if key not in self._calls:
            if not self._meta:
                self._meta.update(meta_encoders(model_file))
            meta = self._meta[stage].to("meta").eval()
            self._calls[key] = calls_of(meta, loaded.to("meta"))
        return self._calls[key]


META = torch.device("meta")


def rank_encoders(
    running: ModelFile, training: Training, first: Module, clip: VideoClip, device: torch.device, init: Path | None
) -> tuple[dict[str, nn.Module], DividedEncoders]:
    """The encoders of a model file, by name, and what of them this rank divides with others, as the stages say.

    Of a weight that is divided, the encoder has zeros without memory. ``clip`` is one that the encoders take, ``init``
    the folder of their weights. Collective. Raises as ``streamed_model``.
    """
    ranks = divided_encoders(first)
    if not ranks and init is None:
        return shared_encoders(running, training, device), DividedEncoders()
    cuts = encoder_cuts(running, ranks, clip)
    kept: dict[str, Tensor] = {}
    parts: dict[str, dict[str, WeightPart]] = {name: {} for name in ranks}

    def taking(encoders: nn.Module) -> Take:
        shapes = {name: parameter.detach() for name, parameter in encoders.named_parameters()}

        def take(name: str, offered: Offered) -> None:
            encoder, _, own = name.partition(".")
            if encoder not in cuts or own not in cuts[encoder].dims:
                kept[name] = offered.whole()
            else:
                parts[encoder][own] = _part(cuts[encoder], own, shapes[name], offered, ranks[encoder])

        return take

    def build(home: torch.device) -> nn.Module:
        return nn.ModuleDict(build_encoders(running, training, home))

    encoders = streamed(build, device, taking, init, EncoderWeights.of)
    put_kept(encoders, dict(encoders.named_parameters()), kept, device)
    return dict(encoders.named_children()), DividedEncoders(parts=parts)


def encoder_cuts(model_file: ModelFile, ranks: dict[str, int], clip: VideoClip) -> dict[str, WeightCuts]:
    """How the weights of each of these encoders are cut: the same on every rank, and as tracing found it."""
    meta = meta_encoders(model_file)
    with META:
        return {name: cuts_of(meta[name].eval(), meta[name].load(clip, META)) for name in ranks}  # type: ignore[operator]


def _part(cuts: WeightCuts, name: str, weight: Tensor, offered: Offered, ranks: int) -> WeightPart:
    """This rank's part of a weight that it is offered, in memory of its own. Rows that lie together are read alone."""
    place = dist.get_rank() % ranks
    layout = cuts.layout(name, tuple(weight.shape), ranks)
    if cuts.dims[name] != COLUMNS:
        whole = offered.piece(0, weight.numel()).view(weight.shape)
        return WeightPart(cuts.part(name, whole, ranks, place).local.clone(), layout)
    (first, _), *_ = layout.held(place)
    shape = layout.local_shape(place)
    width = weight[0].numel()
    return WeightPart(offered.piece(first * width, shape[0] * width).clone().view(shape), layout)
