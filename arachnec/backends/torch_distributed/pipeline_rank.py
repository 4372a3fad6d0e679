"""What a rank holds of a model in stages: its parameters, and which gradients it shares with ranks of other stages.

A parameter of several stages, such as a weight that embedding and head share, lies on the ranks of all of them. Each
stage's all-reduce makes that stage's part of its gradient whole; the parts are added up before the step. What only one
stage has counts once in the gradient's norm, over all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.analysis.residency import resident_ranks
from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.kept_gradients import gradient_dtype, gradient_of, set_gradient
from arachnec.backends.staged_model import Cuts, parts_of
from arachnec.checkpoint.parts import Part, State, part_of
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Module
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.models.file import ModelFile
from arachnec.tracing.layers import layer_of_parameters

Ranks = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PipelineRank:
    """One rank of a pipeline. ``places`` are the ranks of every stage, ``parameters`` its parameters.

    Of the ``sharded`` stages every rank of a place holds a part of the optimizer's state.
    """

    rank: int
    cuts: Cuts
    names: tuple[str, ...]
    places: tuple[Ranks, ...]
    parameters: tuple[frozenset[str], ...]
    sharded: frozenset[str] = frozenset()

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
        sharded = frozenset(stage.name for stage in stages if "sharded" in stage.attrs)
        return cls(rank, cuts, tuple(stage.name for stage in stages), places, owned, sharded)

    @cached_property
    def own(self) -> frozenset[str]:
        """The parameters that lie on this rank."""
        return frozenset().union(
            *(p for p, ranks in zip(self.parameters, self.places, strict=True) if self.rank in ranks)
        )

    @property
    def place(self) -> Ranks | None:
        """The ranks over which the optimizer's state of this rank's stages is dealt out; None where each holds all."""
        places = zip(self.names, self.places, strict=True)
        return next((ranks for name, ranks in places if name in self.sharded and self.rank in ranks), None)

    def of_stages(self, reduces: Sequence[str]) -> dict[str, dict[str, int | None]]:
        """The parameters in each stage's all-reduce, with their layers; the stages in the order of ``reduces``.

        One that two stages of this rank share is in the later all-reduce: its gradient is whole there.
        """
        taken: set[str] = set()
        of: dict[str, dict[str, int | None]] = {}
        for name in reversed(dict.fromkeys(reduces)):
            number = self.number(name)
            layers = self._layers[number]
            own = self.parameters[number] - taken
            of[name] = {parameter: layer for parameter, layer in layers.items() if parameter in own}
            taken |= own
        return of

    @cached_property
    def _layers(self) -> tuple[dict[str, int | None], ...]:
        """Of every stage, the layer of each parameter that trains; None for one that lies outside its layers."""
        return tuple(layer_of_parameters(self.cuts.model, paths) for paths in self.cuts.parts)

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

    @cached_property
    def shared(self) -> dict[Ranks, tuple[str, ...]]:
        """Parameters of several places by all their ranks; the same on every rank."""
        by_ranks: dict[Ranks, list[str]] = {}
        for name, places in sorted(self._places_of.items()):
            if len(places) > 1:
                by_ranks.setdefault(tuple(sorted({rank for place in places for rank in place})), []).append(name)
        return {ranks: tuple(names) for ranks, names in by_ranks.items()}

    @property
    def own_shared(self) -> list[str]:
        """The parameters on this rank that lie on several places."""
        return [name for ranks, names in self.shared.items() if self.rank in ranks for name in names]

    @torch.no_grad()
    def add_up_shared(self, parameters: Mapping[str, Tensor], groups: ProcessGroups) -> None:
        """Add up the parts of gradients that stages share, each whole on its place. Called by all ranks together."""
        for ranks, names in self.shared.items():
            group = groups.get(ranks) if self.rank in ranks else None
            if group is None:
                continue
            for name in names:
                parameter = parameters[name]
                part = gradient_of(parameter)
                if part is None or self.rank not in (place[0] for place in self._places_of[name]):
                    part = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
                dist.all_reduce(part, group=group)
                set_gradient(parameter, part)

    @torch.no_grad()
    def norm(self, gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The norm of the gradients of all stages, in fp32 at least; every rank of the run calls it.

        ``device`` is that of all ranks, where a rank whose stages are frozen has its part, too.
        """
        counted = [gradient for name, gradient in gradients.items() if self._counts(name)]
        precise = [torch.promote_types(gradient.dtype, torch.float32) for gradient in counted]
        norms = [torch.linalg.vector_norm(g, dtype=d).double() for g, d in zip(counted, precise, strict=True)]
        squared = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        dist.all_reduce(squared)
        return squared.sqrt().float()

    def written(self, state: State) -> State:
        """The optimizer's tensors, one rank of those that have each to write it into a checkpoint."""
        return {key: self._written(key.partition("/")[2], value) for key, value in state.items()}

    def _written(self, name: str, value: Tensor | Part) -> Part:
        part = part_of(value)
        return replace(part, writes=part.writes and self._counts(name))

    def _counts(self, name: str) -> bool:
        """Whether this rank counts a gradient for all that have it, or its part of one."""
        place = self._places_of[name][0]
        return self.rank in place if self.place is not None else self.rank == place[0]

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
