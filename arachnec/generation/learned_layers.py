"""Predictors of a model that samples. In: what a run has trained. Out: the stage that says so, and the layers of a
rank's model with their projections.

The plan has the densities, and which layers are ready; the projections are read where the model is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from arachnec.checkpoint.trained_predictors import TrainedPredictors
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import LayerDensity, density_rows, layer_densities, parts_by_layer, sparse_layers
from arachnec.ir.nodes import Cascade, Graph, Stage, integer
from arachnec.ir.stage_sizes import count_in, layers_of
from arachnec.kernels.sparse.predictor import MASS, Projections
from arachnec.kernels.sparse.token_cubes import CELL
from arachnec.planning.sparse_stages import ClassAttention, attentions_of
from arachnec.sparsity.clip_grid import token_grid
from arachnec.spmd.sharded_model import SequenceModel
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade

SITE = 0  # a block that can be sparse has one attention over the clip's tokens


def other_predictors_error(place: str, model: str, what: str) -> UserError:
    return user_error(
        f"the predictors in {place} are not of `{model}`: {what}",
        help="name the run that trained this model's; or take the model out of `predictors()`",
    )


def with_predictors(stage: Stage, graphs: Sequence[Graph], trained: TrainedPredictors) -> Stage:
    """A traced model with the layers whose predictors are ready, as ``learned``. Raises ``UserError`` for those of
    another model."""
    if "graphs" in stage.attrs:
        raise user_error(
            f"`{stage.name}` has predictors, and its blocks have a graph for each clip shape: none can be sparse",
            help="take the model out of `predictors()`",
        )
    known = attentions_of(stage, graphs)
    numbers = {path: number for number, (path, _) in enumerate(layers_of(stage)) if number in known}
    rows: dict[int, LayerDensity] = {}
    ranks: set[int] = set()
    for (path, site), layer in trained.layers.items():
        if path not in numbers or site != SITE:
            what = f"it has no attention over the clip's tokens in `{path}`"
            raise other_predictors_error(trained.place, stage.name, what)
        attention, share = known[numbers[path]]
        ranks.add(_rank(stage, trained, (path, site), attention))
        if layer.ready:
            rows[numbers[path]] = LayerDensity.of(share, layer.densities)
    if len(ranks) > 1:
        raise other_predictors_error(trained.place, stage.name, "they have several ranks")
    return replace(stage, attrs=stage.attrs.updated(learned=density_rows(rows), predictor_rank=ranks.pop()))


def _rank(stage: Stage, trained: TrainedPredictors, layer: Layer, attention: ClassAttention) -> int:
    """Of one layer's predictor, held to the model's heads."""
    heads, features = len(trained.layers[layer].densities.heads), trained.features(layer)
    rank, rest = divmod(features, attention.heads * attention.size)
    if heads != attention.heads:
        what = f"`{layer[0]}` has {heads} heads there, and {attention.heads} here"
    elif rest or not 1 <= rank <= attention.size:
        what = f"those of `{layer[0]}` have {features} numbers, for {heads} heads of {attention.size} features"
    else:
        return rank
    raise other_predictors_error(trained.place, stage.name, what)


def learned_layers(sequence: SequenceModel, stage: Stage, trained: TrainedPredictors | None) -> dict[int, LayerState]:
    """Gives a model on a rank the predictors that its stage is planned with; the layers' states by their number.

    Raises ``UserError`` where they are not there any more, or are others than were planned with.
    """
    table, paths = layer_densities(stage), [path for path, _ in layers_of(stage)]
    names: dict[int, Layer] = {number: (paths[number], SITE) for number in table}
    if trained is None or any(name not in trained.layers for name in names.values()):
        place = "the sampler file" if trained is None else trained.place
        raise other_predictors_error(place, stage.name, "the plan has layers that are not there; compile again")
    rank = count_in(stage, "predictor_rank")
    states = sequence.sparsify(rank, here={path for path, _ in names.values()})
    layers: dict[int, LayerState] = {}
    for number, name in names.items():
        if name not in states:
            what = f"the attention of `{name[0]}`, as it runs, cannot be sparse"
            raise other_predictors_error(trained.place, stage.name, what)
        site, own = states[name].site, states[name].projections
        query, key = trained.projections(name, (site.heads, site.head_size, rank))
        by = Projections(query.to(own.query.device), key.to(own.key.device))
        layers[number] = replace(states[name], projections=by, densities=table[number].heads, sparse=True)
    return layers


def sparse_attention(
    stage: Stage, layers: Mapping[int, LayerState], cascade: Cascade, clip: VideoClip, ranks: int
) -> SparseCascade | None:
    """The sparse attention of a segment's forwards on so many ranks, with the densities of its clips' class of length;
    None for a segment that is dense."""
    numbers = sparse_layers(cascade)
    if not numbers:
        return None
    paths, densities = [path for path, _ in layers_of(stage)], layer_densities(stage)
    own = {n: replace(layers[n], densities=densities[n].at(cascade.tokens).heads) for n in numbers}
    queries, keys = count_in(stage, "query_group"), count_in(stage, "key_block")
    mass = stage.attrs.get("mass", MASS)
    assert isinstance(mass, int | float)
    divided = parts_by_layer(cascade) if ranks == cascade.degree else {}
    return SparseCascade(
        {(paths[number], SITE): state for number, state in own.items()},
        token_grid(cascade.tokens, clip.frames, clip.height, clip.width),
        (),
        sizes=(queries, keys, min(CELL, queries, keys)),
        mass=float(mass),
        parts={(paths[number], SITE): parts for number, parts in divided.items()},
        groups=integer(cascade.attrs.get("groups", 0)),
    )
