"""The predictors of a run's sparse layers, alike on all ranks: learned beside the model and measured in some steps.

In: a program whose trained stages have densities, its model in sequence-parallel form, and what its cascades measured.
Out: the sparse attention of every cascade, the state that a checkpoint keeps, and a summary of every layer.
docs/sparse_attention.md.

The predictors are none of what the model's optimizer updates, clips or sends: they have their own Adam and one
all-reduce a step, the instruction ``learn`` behind the update. So no bit of the model's gradient depends on them. Where
the model is cut into stages a layer's predictor, its gradients and its moments are on the ranks of its stage alone, and
have an all-reduce of these; what is measured of a layer all ranks know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.analysis.stage_ranks import resident_ranks
from arachnec.checkpoint.class_states import CLASSES, ClassState, class_tensor
from arachnec.checkpoint.parts import Part, part_of
from arachnec.cost.sparse_attention import faster_sparse
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Mistake, UserError, user_error
from arachnec.ir.head_density import (
    ByLength,
    HeadPart,
    Heads,
    LayerDensity,
    latest_densities,
    layer_densities,
    length_class,
    parts_by_layer,
    sparse_layers,
    sparse_stages,
)
from arachnec.ir.nodes import Cascade, Module, Phase, Stage, integer
from arachnec.ir.stage_sizes import count_in, layers_of
from arachnec.kernels.sparse.cube_sides import Grid, cube_counts
from arachnec.kernels.sparse.predictor import MASS, kept_blocks
from arachnec.kernels.sparse.token_cubes import CELL
from arachnec.model_state.key_list_files import ListFiles, ListSizes, write_lists
from arachnec.model_state.layer_summary import LayerSummary
from arachnec.model_state.measured_layers import (
    HISTORY,
    LEAST,
    PlannedLayer,
    SparsityHistory,
    add_to,
    classes_after,
    for_length,
    kept_history,
    kept_layers,
    layer_summary,
    means,
    no_totals,
    spread,
    weights_of,
)
from arachnec.planning.sparse_stages import forecasts
from arachnec.sparsity.clip_grid import caption_blocks, token_grid
from arachnec.sparsity.head_shares import learns, lists_fit
from arachnec.spmd.chosen_fetch import Room
from arachnec.spmd.sparse_layers import Layer, LayerState, Measured, SparseCascade, after

RATE = 3e-3  # of the predictors' Adam
MOMENTS = ("exp_avg", "exp_avg_sq")


class CanBeSparse(Protocol):
    """``arachnec.spmd.sharded_model.SequenceModel``."""

    def sparsify(self, rank: int, seed: int, here: Set[str] | None = None) -> dict[Layer, LayerState]: ...


Groups = Callable[[tuple[int, ...]], dist.ProcessGroup | None]
Rows = Mapping[int, tuple[Tensor, list[Tensor]]]  # of every layer totals, and the gradients of its predictor


@dataclass
class SparsePredictors:
    """``layers`` by number: what is known before the next step, for clips of all lengths; ``classes`` by class of
    length, of those that were measured. ``collect`` and ``finish`` are called by all ranks.

    ``stages`` are those of the program that have layers, by the number of their first. ``places`` are, of a model that
    is cut into stages, the ranks of every one and its layers; projections of layers that are not on this ``rank`` have
    no elements."""

    names: Mapping[int, Layer]
    layers: dict[int, LayerState]
    sizes: tuple[int, int, int]  # tokens of a group, a block and a cell
    mass: float  # of a group's attention, that its blocks are to hold
    optimizer: torch.optim.Adam
    stages: Mapping[int, Stage]
    classes: dict[int, dict[int, ClassState]] = field(default_factory=dict)
    rank: int = 0
    places: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = ()
    measured: dict[int, Measured] = field(default_factory=dict)  # of the last step that did
    files: ListFiles = field(default_factory=ListFiles)
    history: SparsityHistory = field(default_factory=SparsityHistory)
    node: int = 0  # consecutive ranks of one of several machines; 0 where all keys travel
    spread: dict[int, tuple[float, ...]] = field(default_factory=dict)  # as in ``Room``, of the last step that measured
    all_keys: bool = False  # in the step that is done now, as some had no room
    _cascades: dict[str, SparseCascade] = field(default_factory=dict)
    _clips: dict[str, list[str]] = field(default_factory=dict)  # ids, by cascade
    _tokens: dict[str, int] = field(default_factory=dict)  # of a clip, by cascade
    _dense: set[tuple[str, Layer]] = field(default_factory=set)  # clips and layers that are, in cascades of this step
    _totals: dict[int, Tensor] = field(default_factory=dict)
    _overflowed: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, module: Module, sequence: CanBeSparse, seed: int, rank: int = 0) -> SparsePredictors:
        """Gives the blocks of ``sequence`` that this rank of ``module`` has their predictors, all layers dense. Raises
        ``UserError`` for a layer with densities that cannot be sparse."""
        stages = sparse_stages(module)
        names: dict[int, Layer] = {}
        places: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for first, part in stages.items():
            paths = [path for path, _ in layers_of(part)]
            own = {first + layer: (paths[layer], 0) for layer in layer_densities(part)}
            names |= own
            if "part_of" in part.attrs:
                assert module.cluster is not None
                places.append((tuple(sorted(resident_ranks(module, module.cluster, part))), tuple(own)))
        here = {names[n][0] for ranks, numbers in places for n in numbers if rank in ranks} if places else None
        stage = next(iter(stages.values()))
        states = sequence.sparsify(count_in(stage, "predictor_rank"), seed, here)
        lacking = [
            Mistake(
                stage.span,
                f"layer {n}, `{name[0]}`, is planned sparse, and its block as it runs cannot be",
                help="compile without `sparsify`, or give it a file of densities without this layer",
            )
            for n, name in names.items()
            if name not in states
        ]
        if lacking:
            raise UserError(lacking[0])
        layers = {number: states[name] for number, name in names.items()}
        values = [value for state in layers.values() for value in _parameters(state) if value.numel()]
        optimizer = torch.optim.Adam([{"params": values}], lr=RATE)  # of a rank whose stages are dense: none
        for value in values:
            moments = {name: torch.zeros_like(value) for name in MOMENTS}
            optimizer.state[value] = {"step": torch.zeros(()), **moments}
        queries, keys = count_in(stage, "query_group"), count_in(stage, "key_block")
        mass = stage.attrs.get("mass", MASS)
        assert isinstance(mass, int | float)
        sizes = queries, keys, min(CELL, queries, keys)
        return cls(names, layers, sizes, float(mass), optimizer, stages, rank=rank, places=places)

    def cascade(
        self,
        cascade: Cascade,
        clips: Mapping[int, VideoClip],
        seed: int,
        step: int,
        weight: float | None,
        *,
        kept: Sequence[int] | None = None,
        trains: bool = True,
    ) -> SparseCascade | None:
        """The sparse attention of a cascade, the same in its forward and its backward; None for one that is dense.
        With a ``weight`` its layers learn and are measured, those whose turn it is, from the clips that are ``kept``:
        None are all. One that ``trains`` may be done again."""
        if weight is not None:
            self._keep_dense(cascade, clips, step)
        if not sparse_layers(cascade):
            return None
        first, stage = self._stage_named(cascade.stage)
        numbers = tuple(first + layer for layer in sparse_layers(cascade))
        if cascade.name not in self._cascades:
            clip = clips[cascade.clips[0]]
            own = [str(clips[number].id) for number in cascade.clips]
            grid = token_grid(cascade.tokens, clip.frames, clip.height, clip.width)
            sizes = {self.names[number]: self._list_sizes(number, grid, stage, cascade.text) for number in numbers}
            resting = self._resting(step) & set(numbers)
            replay = self.files.lists(step, own, sizes) if weight is not None else {}
            self._clips[cascade.name], self._tokens[cascade.name] = own, cascade.tokens
            self._cascades[cascade.name] = SparseCascade(
                {self.names[number]: self._on_the_faster_path(number, cascade) for number in numbers},
                grid,
                tuple(f"{seed}/{step}/{name}" for name in own),
                weight=weight,
                sizes=self.sizes,
                replay=replay,
                mass=self.mass,
                parts=self._parts(first, cascade, sizes),
                groups=integer(cascade.attrs.get("groups", 0)),
                room=self._room(resting, cascade.tokens) if trains and self.fetches(step) else {},
                resting=frozenset(self.names[number] for number in resting),
                aside=frozenset() if kept is None else frozenset(range(len(own))) - set(kept),
            )
        return self._cascades[cascade.name]

    def _keep_dense(self, cascade: Cascade, clips: Mapping[int, VideoClip], step: int) -> None:
        """Layers that the plan runs dense for these clips, though others may be sparse: they are saved and demanded as
        such."""
        if self.files.save is None and self.files.replay is None:
            return
        for first, stage in self.stages.items():
            if stage.name == cascade.stage and cascade.phase in (Phase.TRAIN, Phase.FORWARD):
                own = [str(clips[number].id) for number in cascade.clips]
                dense = [self.names[first + n] for n in layer_densities(stage) if n not in sparse_layers(cascade)]
                self.files.demand_dense(step, own, dense)
                self._dense |= {(clip, layer) for layer in dense for clip in own}

    def _parts(self, first: int, cascade: Cascade, sizes: Mapping[Layer, ListSizes]) -> dict[Layer, Sequence[HeadPart]]:
        """Who computes which groups of which head; heads of a layer that is not in it go by number. So they do where
        the lists of the planned parts, as long as heads need by now for such clips, have no room."""
        divided: dict[Layer, Sequence[HeadPart]] = {}
        for layer, parts in parts_by_layer(cascade).items():
            name, densities = self.names[first + layer], self._for_length(first + layer, cascade.tokens).densities
            of, captions = sizes[name], sizes[name].captions
            video = of.blocks - captions
            groups = integer(cascade.attrs["groups"])
            if lists_fit(parts, kept_blocks(densities, video), cascade.degree, groups, video, captions):
                divided[name] = parts
        return divided

    def _list_sizes(self, number: int, grid: Grid, stage: Stage, text: int) -> ListSizes:
        site, (queries, keys, _) = self.layers[number].site, self.sizes
        groups, blocks = cube_counts(grid, queries, keys)
        captions = caption_blocks(stage, text) if site.captions else 0
        return ListSizes(site.heads, groups, blocks + captions, captions)

    def _on_the_faster_path(self, number: int, cascade: Cascade) -> LayerState:
        """A layer as it runs for clips of the cascade's length: dense where that is faster by what its heads need."""
        state = self._for_length(number, cascade.tokens)
        return replace(state, sparse=state.sparse and self._is_faster_sparse(number, cascade.tokens, cascade.text))

    def _for_length(self, number: int, tokens: int) -> LayerState:
        return for_length(self.layers[number], self.classes.get(number, {}), tokens)

    def _is_faster_sparse(self, number: int, tokens: int, text: int) -> bool:
        first, stage = self._stage_of(number)
        share = layer_densities(stage)[number - first].share
        measured = {number - first: LayerDensity(share, self._for_length(number, tokens).densities)}
        return bool(faster_sparse(stage, tokens, text, measured))

    def _stage_of(self, number: int) -> tuple[int, Stage]:
        """The stage of a layer, and the number of its first."""
        return max((row for row in self.stages.items() if row[0] <= number), key=lambda row: row[0])

    def _stage_named(self, name: str) -> tuple[int, Stage]:
        return next((first, stage) for first, stage in self.stages.items() if stage.name == name)

    def fetches(self, step: int) -> bool:
        """Whether ranks get only the keys that they chose, in sparse layers that do not learn in this step: between
        machines, as those that learn need all keys."""
        return self.node > 0 and not self.all_keys and bool(self._resting(step))

    def _resting(self, step: int) -> set[int]:
        """The layers that do not learn in this step. No plan changes them."""
        return {number for number, state in self.layers.items() if not learns(number, step, state.sparse)}

    def _room(self, numbers: Iterable[int], tokens: int) -> dict[Layer, Room]:
        known = {n: self.spread.get(n, (1.0,) * self.layers[n].site.heads) for n in numbers}
        of_class = {n: self.classes.get(n, {}).get(length_class(tokens)) for n in known}
        known |= {n: own.spread for n, own in of_class.items() if own is not None}
        return {self.names[number]: Room(self.node, spread) for number, spread in known.items()}

    def lacked_keys(self, group: dist.ProcessGroup | None) -> bool:
        """Whether some rank's groups chose keys that had no room, behind a step that ``fetches``. Nothing was updated
        then, and what was measured is forgotten. Collective; waits for the device."""
        device = next(iter(self.layers.values())).projections.query.device
        lacking = torch.stack([*self._overflowed, torch.zeros((), dtype=torch.bool, device=device)]).any().float()
        if group is not None:
            dist.all_reduce(lacking, group=group)
        self._overflowed.clear()
        if not bool(lacking > 0):
            return False
        self._totals.clear()
        self.optimizer.zero_grad()
        return True

    def collect(self, step: int) -> None:
        """Add up what this rank measured in one iteration, by head, each cascade with its weight; write its lists."""
        trained = [(self._clips[name], c) for name, c in self._cascades.items() if c.weight is not None]
        if self.files.save is not None and step >= 0:  # no step of training is before: only losses are measured
            write_lists(self.files.save, step, dist.get_rank(), dist.get_world_size(), trained, self._dense)
        self._clips.clear()
        self._dense.clear()
        for label, cascade in self._cascades.items():
            self._overflowed += cascade.overflowed
            for number, name in self.names.items():
                measured = cascade.measured.get(name)
                if measured is None or cascade.weight is None:
                    continue
                if number not in self._totals:
                    self._totals[number] = no_totals(self.layers[number])
                add_to(self._totals[number], measured, self._tokens[label], cascade.weight)
        self._cascades.clear()
        self._tokens.clear()

    def finish(
        self, step: int, group: dist.ProcessGroup | None, groups: Groups | None = None, norm: Tensor | None = None
    ) -> None:
        """Update the predictors, and what is known of every layer, from what all ranks measured. Collective over the
        group of all ranks, None for one rank; ``groups`` gives that of the ranks of a stage.

        Waits for the device. Where the ``norm`` of the model's gradient is not finite on some rank, nothing changes.
        Raises ``UserError`` for scores that are not finite.
        """
        device = next(iter(self.layers.values())).projections.query.device
        broken = torch.zeros((), device=device) if norm is None else (~norm.isfinite()).float().to(device)
        broken, rows = self._everyone(group, broken) if not self.places else self._of_stages(group, groups, broken)
        self._totals.clear()
        if not bool(broken > 0):
            self._learn(rows, step)
        self.optimizer.zero_grad()
        self.history.add(step, {number: self._by_length(number, "sparsities") for number in self.layers})

    def _everyone(self, group: dist.ProcessGroup | None, broken: Tensor) -> tuple[Tensor, Rows]:
        """How many ranks have a gradient that is ``broken``; for every layer the totals and the predictors' gradients
        of all ranks. In one all-reduce."""
        own = [broken]
        for number, state in self.layers.items():
            own += [self._total(number), *_gradients(state)]
        parts = iter(_all_reduced(own, group))
        return next(parts), {number: (next(parts), [next(parts), next(parts)]) for number in self.layers}

    def _of_stages(self, group: dist.ProcessGroup | None, groups: Groups | None, broken: Tensor) -> tuple[Tensor, Rows]:
        """The same where layers are in stages: gradients of those here, all-reduced over the ranks of their stage.
        Totals of a layer whose gradients are not finite are not, so that all ranks know of it."""
        gradients: dict[int, list[Tensor]] = {number: list(_parameters(s)) for number, s in self.layers.items()}
        totals = {number: self._total(number) for number in self.layers}
        for ranks, numbers in self.places:
            if self.rank not in ranks:
                continue
            own = [gradient for number in numbers for gradient in _gradients(self.layers[number])]
            parts = iter(_all_reduced(own, groups(ranks) if groups is not None else None))
            for number in numbers:
                gradients[number] = [next(parts), next(parts)]
                broken = ~torch.stack([gradient.isfinite().all() for gradient in gradients[number]]).all()
                totals[number] = totals[number].masked_fill(broken, torch.nan)
        broken, *summed = _all_reduced([broken, *totals.values()], group)
        rows = zip(self.layers, summed, strict=True)
        return broken, {number: (total, gradients[number]) for number, total in rows}

    def _total(self, number: int) -> Tensor:
        return self._totals[number] if number in self._totals else no_totals(self.layers[number])

    def _learn(self, rows: Rows, step: int) -> None:
        known = {number: (totals.cpu(), gradients) for number, (totals, gradients) in rows.items()}
        seen = {number: row for number, row in known.items() if not bool((weights_of(row[0]) <= 0).any())}
        for number, (totals, gradients) in seen.items():
            if not bool(totals.isfinite().all()) or not all(bool(g.isfinite().all()) for g in gradients):
                raise user_error(
                    f"the attention scores of layer {number} are not finite in step {step}, though the loss is",
                    help="no keys can be chosen by them: train in fp32 or bf16, or leave this layer out of `sparsify`",
                )
        for number, (totals, gradients) in seen.items():
            state, weights = self.layers[number], weights_of(totals)
            of_query, of_key = gradients
            if state.projections.query.numel():
                of_query, of_key = (gradient / weights.to(gradient)[:, None, None] for gradient in gradients)
                state.projections.query.grad, state.projections.key.grad = of_query, of_key
            self.measured[number] = means(totals, (of_query, of_key))
            self.spread[number] = spread(self.measured[number])
            self.classes[number] = classes_after(state, self.classes.get(number, {}), totals)
            self.layers[number] = after(state, self.measured[number])
        for number in known.keys() - seen.keys():
            for value in _parameters(self.layers[number]):
                value.grad = None
        self.optimizer.step()

    @property
    def running(self) -> dict[int, ByLength]:
        """By layer that is sparse in the next step, the share of keys that each head takes: above 0, to 1."""
        sparse = {n: self._by_length(n, "densities") for n, state in self.layers.items() if state.sparse}
        return {number: _shares(row) for number, row in sparse.items()}

    def _by_length(self, number: int, name: Literal["sparsities", "densities"]) -> ByLength:
        own = self.classes.get(number, {})
        return ByLength(getattr(self.layers[number], name), tuple((n, getattr(x, name)) for n, x in own.items()))

    def tensors(self) -> dict[str, Tensor | Part]:
        """What the next step depends on: projections and moments over the memory in use, and of every layer sparsities,
        densities and its spread, by class of length too, and whether it is sparse; and the history. What was loaded
        into these goes to ``loaded``. What the ranks of a stage alone have, the first of them writes."""
        state: dict[str, Tensor | Part] = {f"{HISTORY}steps": self.history.numbers()}
        writer = {number: ranks[0] for ranks, numbers in self.places for number in numbers}
        for number, (path, site) in self.names.items():
            name = f"{path}.{site}"
            heads = self.layers[number].site.heads
            state[f"predictor/layer/{name}"] = _row(self.layers[number])
            state[f"{HISTORY}layer/{name}"] = self.history.of_layer(number, heads)
            state[f"{HISTORY}by-class/{name}"] = self.history.of_classes(number, heads)
            state[f"{CLASSES}{name}"] = class_tensor(self.classes.get(number, {}), heads)
            state[f"{HISTORY}spread/{name}"] = torch.tensor(self.spread.get(number, (1.0,) * heads))
            for side, value in zip(("query", "key"), _parameters(self.layers[number]), strict=True):
                if not value.numel():
                    continue
                own = {f"{side}/{name}": value.detach()}
                own |= {f"{key}/{side}/{name}": moment for key, moment in self.optimizer.state[value].items()}
                for key, tensor in own.items():
                    writes = writer.get(number) == self.rank
                    state[f"predictor/{key}"] = replace(part_of(tensor), writes=writes) if self.places else tensor
        return state

    def loaded(self, tensors: Mapping[str, Any], folder: str) -> None:
        """Take the layers' states from tensors as ``tensors`` gave them, filled by now from a checkpoint's ``folder``;
        those of ``HISTORY`` where there are some. Raises ``UserError`` for damaged ones."""
        names = {number: f"{path}.{site}" for number, (path, site) in self.names.items()}
        kept = kept_layers(tensors, names, folder)
        for number, own in kept.items():
            self.layers[number] = replace(
                self.layers[number], sparsities=own.sparsities, densities=own.densities, sparse=own.sparse
            )
        self.spread = {number: own.spread for number, own in kept.items() if own.spread is not None}
        self.classes = {number: dict(own.classes) for number, own in kept.items() if own.classes is not None}
        self.history = kept_history(tensors, names, folder)

    def summary(self, module: Module) -> list[LayerSummary]:
        """``module`` is the program of the last step."""
        rows = {first: latest_densities(stage) for first, stage in sparse_stages(module).items()}
        planned = {first + layer: density for first, table in rows.items() for layer, density in table.items()}
        told = forecasts(module, {number: self._by_length(number, "densities") for number in self.layers})
        of_plan = {n: PlannedLayer(planned[n], told[n], self._sparse_lengths(module, n)) for n in self.layers}
        known = {n: (self.names[n][0], state, self.classes.get(n, {})) for n, state in self.layers.items()}
        return [layer_summary(n, *own, self.measured.get(n), of_plan[n], self.history) for n, own in known.items()]

    def _sparse_lengths(self, module: Module, number: int) -> list[int]:
        first, stage = self._stage_of(number)
        own = (c for c in module.cascades if c.stage == stage.name and number - first in sparse_layers(c))
        lengths = {(cascade.tokens, cascade.text) for cascade in own if self.layers[number].sparse}
        return sorted({tokens for tokens, text in lengths if self._is_faster_sparse(number, tokens, text)})


def _parameters(state: LayerState) -> tuple[Tensor, Tensor]:
    return state.projections.query, state.projections.key


def _gradients(state: LayerState) -> list[Tensor]:
    return [torch.zeros_like(value) if value.grad is None else value.grad for value in _parameters(state)]


def _all_reduced(own: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """These, all-reduced over the ranks of a group at once, in 32 bits."""
    flat = torch.cat([value.reshape(-1).float() for value in own])
    if group is not None:
        dist.all_reduce(flat, group=group)
    parts = zip(flat.split_with_sizes([value.numel() for value in own]), own, strict=True)
    return [part.view_as(value) for part, value in parts]


def _shares(densities: ByLength) -> ByLength:
    def of_keys(row: Heads) -> Heads:
        return tuple(min(1.0, max(LEAST, x)) for x in row)

    return ByLength(of_keys(densities.heads), tuple((length, of_keys(row)) for length, row in densities.classes))


def _row(state: LayerState) -> Tensor:
    return torch.tensor([*state.sparsities, *state.densities, float(state.sparse)], dtype=torch.float64)
