"""What a rank holds of a model in stages: its parameters, and which gradients it shares with ranks of other stages.

A parameter of several stages, such as a weight that embedding and head share, lies on the ranks of all of them. All of
these ranks have a part of its gradient: an all-reduce of its own makes it whole. It counts once in the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.staged_model import Cuts, parts_of
from arachnec.checkpoint.parts import Part, State, part_of
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Module
from arachnec.lowering.programs import resident_ranks
from arachnec.models.file import ModelFile

Ranks = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PipelineRank:
    """One rank of a pipeline. ``places`` are the ranks of every stage, ``parameters`` its parameters."""

    rank: int
    cuts: Cuts
    names: tuple[str, ...]
    places: tuple[Ranks, ...]
    parameters: tuple[frozenset[str], ...]

    @classmethod
    def of(
        cls, model_file: ModelFile, training: Training, module: Module, clips: Sequence[VideoClip], rank: int
    ) -> PipelineRank | None:
        """None where the model of ``module`` is one stage."""
        stages = parts_of(module)
        if not stages or module.cluster is None:
            return None
        cuts = Cuts.of(model_file, training, stages)
        places = tuple(tuple(sorted(resident_ranks(module, module.cluster, stage))) for stage in stages)
        parameters = cuts.at(clips[0], 1).parameters
        known = frozenset().union(*parameters)
        unread = frozenset(name for name, _ in cuts.model.named_parameters() if name not in known)
        owned = (parameters[0] | unread, *parameters[1:])
        return cls(rank, cuts, tuple(stage.name for stage in stages), places, owned)

    @cached_property
    def own(self) -> frozenset[str]:
        """The parameters that lie on this rank."""
        return frozenset().union(
            *(p for p, ranks in zip(self.parameters, self.places, strict=True) if self.rank in ranks)
        )

    @cached_property
    def of_stages(self) -> dict[str, frozenset[str]]:
        """The parameters in each stage's all-reduce: of those that several stages of one place share, the first's."""
        taken = set[str]().union(*self.tied.values())
        of: dict[str, frozenset[str]] = {}
        for name, parameters in zip(self.names, self.parameters, strict=True):
            of[name] = frozenset(parameters - taken)
            taken |= parameters
        return of

    @cached_property
    def tied(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Parameters that train and that stages on different ranks read, by the numbers of these stages."""
        stages: dict[tuple[int, ...], list[str]] = {}
        for name, places in self._places_of.items():
            if len(places) > 1:
                readers = tuple(n for n, parameters in enumerate(self.parameters) if name in parameters)
                stages.setdefault(readers, []).append(name)
        return {readers: tuple(names) for readers, names in stages.items()}

    def number(self, stage: str) -> int:
        return self.names.index(stage)

    @cached_property
    def _places_of(self) -> dict[str, tuple[Ranks, ...]]:
        """The places of every parameter that trains, each once, in the order of the stages."""
        trained = trained_parameters(self.cuts.model)
        return {
            name: tuple(dict.fromkeys(p for own, p in zip(self.parameters, self.places, strict=True) if name in own))
            for name in trained
        }

    def written(self, state: State) -> State:
        """The optimizer's tensors, one rank of those that have each to write it into a checkpoint."""
        return {key: self._written(key.partition("/")[2], value) for key, value in state.items()}

    def _written(self, name: str, value: Tensor | Part) -> Part:
        part = part_of(value)
        return replace(part, writes=part.writes and self.counts(name))

    def counts(self, name: str) -> bool:
        """Whether this rank counts a gradient for all that have it."""
        return self._places_of[name][0][0] == self.rank

    def whole_gradients(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0 the gradient of every parameter of the model, on the host; nothing elsewhere. Collective."""
        whole: dict[str, Tensor] = {}
        for name, meta in trained_parameters(self.cuts.model).items():
            source = self._places_of[name][0][0]
            if self.rank == source:
                value = own[name].cpu().contiguous()
                if source:
                    dist.send(value, 0)
                else:
                    whole[name] = value
            elif self.rank == 0:
                whole[name] = torch.empty(meta.shape, dtype=meta.dtype)
                dist.recv(whole[name], source)
        return whole
