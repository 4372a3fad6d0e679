"""Encoders of which several ranks run one clip together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from arachnec.models.encoders import tiling_vae
from arachnec.models.file import ModelFile
from arachnec.spmd.spatial.encoding import encode_together
from arachnec.spmd.spatial.peers import Group
from arachnec.spmd.spatial.tiles import Call, calls_of
from arachnec.spmd.tensor_parallel.weights import WeightPart, encode_with_parts
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
