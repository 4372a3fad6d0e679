"""What a rank holds of a model in stages: its parameters, and which gradients it shares with ranks of other stages.

A parameter of several stages, such as a weight that embedding and head share, lies on the ranks of all of them. All of
these ranks have a part of its gradient: an all-reduce of its own makes it whole. It counts once in the gradient's norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.analysis.stage_ranks import resident_ranks
from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.staged_model import Cuts, parts_of
from arachnec.backends.torch_distributed.weights.dealt_out_model import DealtStage
from arachnec.checkpoint.parts import Part, State, part_of
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.host_placement import layers_in_host
from arachnec.ir.nodes import Module
from arachnec.ir.parameter_cells import cell_of
from arachnec.models.file import ModelFile
from arachnec.tracing.layers import layer_of_parameters

Ranks = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PipelineRank:
    """One rank of a pipeline. ``places`` are the ranks of every stage, ``parameters`` its parameters.

    Of the ``sharded`` stages every rank of a place holds a part of the optimizer's state. Others are dealt out over
    ``cells`` of so many ranks, 1 for none.
    """

    rank: int
    cuts: Cuts
    names: tuple[str, ...]
    places: tuple[Ranks, ...]
    parameters: tuple[frozenset[str], ...]
    cells: tuple[int, ...]
    sharded: frozenset[str] = frozenset()
    in_host: frozenset[str] = frozenset()  # stages whose layers lie in the hosts' memory

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
        cells = tuple(cell_of(stage) or 1 for stage in stages)
        in_host = frozenset(stage.name for stage in stages if layers_in_host(stage))
        return cls(rank, cuts, tuple(stage.name for stage in stages), places, owned, cells, sharded, in_host)

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

        Of those that several stages of one place share, the later all-reduce has them: their gradients are whole there.
        One that lies on other ranks too is in none of these.
        """
        taken = set[str]().union(*self.tied.values())
        of: dict[str, dict[str, int | None]] = {}
        for name in reversed(dict.fromkeys(reduces)):
            number = self.number(name)
            layers = self._layers[number]
            own = self.parameters[number] - taken
            of[name] = {parameter: layer for parameter, layer in layers.items() if parameter in own}
            taken |= own
        return of

    @cached_property
    def tied(self) -> dict[tuple[int, ...], tuple[str, ...]]:
        """Parameters that train and that stages on different ranks read, by the numbers of these stages; in cells those
        that several stages read."""
        stages: dict[tuple[int, ...], list[str]] = {}
        for name, places in self._places_of.items():
            readers = tuple(n for n, parameters in enumerate(self.parameters) if name in parameters)
            if len(places) > 1 or (self.dealt_out and len(readers) > 1):
                stages.setdefault(readers, []).append(name)
        return {readers: tuple(names) for readers, names in stages.items()}

    @cached_property
    def updated(self) -> dict[str, dict[str, int | None]]:
        """The parameters that train of each stage of this rank, each once, with their layers."""
        taken: set[str] = set()
        of: dict[str, dict[str, int | None]] = {}
        for number, (name, ranks) in enumerate(zip(self.names, self.places, strict=True)):
            if self.rank in ranks:
                own = self.parameters[number] - taken
                of[name] = {p: layer for p, layer in self._layers[number].items() if p in own}
                taken |= own
        return of

    @cached_property
    def _layers(self) -> tuple[dict[str, int | None], ...]:
        """Of every stage, the layer of each parameter that trains; None for one that lies outside its layers."""
        return tuple(layer_of_parameters(self.cuts.model, paths) for paths in self.cuts.parts)

    @cached_property
    def dealt_out(self) -> tuple[DealtStage, ...]:
        """What lies in cells or in hosts' memory. A parameter of several stages does not: it is whole on their
        ranks."""
        counts = Counter(name for own in self.parameters for name in own)
        rows = zip(self.names, self.cuts.parts, self.parameters, self.places, self.cells, strict=True)
        return tuple(
            DealtStage(name, paths, frozenset(p for p in own if counts[p] == 1), place, cell, name in self.in_host)
            for name, paths, own, place, cell in rows
            if cell > 1 or name in self.in_host
        )

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
        """Whether this rank counts a gradient for all that have it, or its part of one."""
        place = self._places_of[name][0]
        if self.place is not None:
            return self.rank in place
        dealt = next((stage for stage in self.dealt_out if name in (stage.parameters or ())), None)
        return self.rank in place[: 1 if dealt is None else dealt.cell]

    def whole_gradients(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0 the gradient of every parameter of the model, on the host; nothing elsewhere. Collective.

        In fp32 at least: a rank that does not have a parameter does not know in which precision its gradient is kept.
        """
        whole: dict[str, Tensor] = {}
        for name, meta in trained_parameters(self.cuts.model).items():
            source = self._places_of[name][0][0]
            dtype = torch.promote_types(meta.dtype, torch.float32)
            if self.rank == source:
                value = own[name].to("cpu", dtype).contiguous()
                if source:
                    dist.send(value, 0)
                else:
                    whole[name] = value
            elif self.rank == 0:
                whole[name] = torch.empty(meta.shape, dtype=dtype)
                dist.recv(whole[name], source)
        return whole
