"""A traced stage cut into runs of its blocks. In: the stage and the first layer of every part. Out: the parts.

The embedding goes with the first blocks and the head with the last, as the model's own forward comes to them
(``tracing.dataflow``). Every part has its own costs, memory and parameters, by ``trace``'s figures per block class.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from arachnec.ir.diagnostic import counted, user_error
from arachnec.ir.head_density import density_rows, layer_densities, part_densities
from arachnec.ir.nodes import Clip, Module, Stage, formula, integer, integers
from arachnec.ir.stage_sizes import layers_of, squared, tied_sets
from arachnec.ir.state_placement import Sums, place, tensor_attributes, tensors_of_part
from arachnec.ir.tables import BETWEEN, CHOICE, FIGURES, TIED, TOKEN_CUTS, UNCUT
from arachnec.ir.values import Attributes, Formula, Quantity, Value, formula_sum, non_negative


def demand_cuttable(stage: Stage) -> None:
    """Raises UserError for a part of a stage, and for a stage without figures for its parts or with one in host
    memory."""
    if "part_of" in stage.attrs:
        raise user_error(
            f"@{stage.attrs['part_of']!s} is cut into stages already",
            label="one of them",
            help="a pipeline has one pass that cuts: `stages`, `stages-dapple` or `stages-adaptis`",
            span=stage.span,
        )
    placed = stage.attrs.get("host")
    if isinstance(placed, tuple) and placed:
        kinds = ", ".join(f'"{name}"' for name in placed)
        raise user_error(
            f"@{stage.name} lies in host memory already, and cannot be cut",
            label=f"has `host = [{kinds}]`",
            help="put `offload` behind `stages`: every stage then has its own part there",
            span=stage.span,
        )
    if any(name not in stage.attrs for name in FIGURES):
        reason = stage.attrs.get(UNCUT) or "`trace` says nothing of its parts"
        raise user_error(
            f"stage @{stage.name} cannot be cut: {reason}",
            label="has no `cuts`",
            help="call every block once, and pass on what can be followed; or leave `stages` out",
            span=stage.span,
        )


def demand_cuts(stage: Stage, cuts: Sequence[int]) -> None:
    """Raises UserError where a cut is out of order or leaves a stage without blocks."""
    last_block = len(layers_of(stage)) - 1
    unordered = next(((a, b) for a, b in pairwise(cuts) if b <= a), None)
    outside = next((cut for cut in cuts if not 0 < cut <= last_block), None)
    if unordered is not None:
        before, after = unordered
        wrong = f"the cuts {list(cuts)} of @{stage.name} are not in order: {after} stands behind {before}"
    elif outside is not None:
        wrong = f"cut {outside} of @{stage.name} leaves a stage without blocks"
    else:
        return
    raise user_error(
        wrong,
        label=f"has blocks 0 to {last_block}",
        help=f"a cut is the number of the first block of a stage: ascending, each once, from 1 to {last_block}",
        span=stage.span,
    )


def balanced_cuts(stage: Stage, stages: int, clips: Sequence[Clip]) -> tuple[int, ...]:
    """The cuts with the least work in the largest stage, embedding and head counted; of these the evenest.

    Work is the FLOPs of one forward of all ``clips``. Exact, by dynamic programming over (layer, stages).
    """
    work = layer_work(stage, clips)
    layers = len(work)
    if not 1 <= stages <= layers:
        raise user_error(
            f"`stages{{p={stages}}}` of @{stage.name}, which has {layers} blocks",
            label=f"{layers} blocks",
            help=f"every stage runs at least one block: give p from 1 to {layers}",
            span=stage.span,
        )
    before = [0.0]
    for amount in work:
        before.append(before[-1] + amount)
    # best[i]: largest stage, sum of squares, and cuts, of the first i layers in so many stages
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {i: (before[i], before[i] ** 2, ()) for i in range(1, layers + 1)}
    for count in range(2, stages + 1):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for i in range(count, layers + 1):
            following[i] = min(
                (max(largest, last := before[i] - before[j]), squares + last**2, (*cuts, j))
                for j, (largest, squares, cuts) in ((j, best[j]) for j in range(count - 1, i))
            )
        best = following
    return best[layers][2]


def layer_work(stage: Stage, clips: Sequence[Clip]) -> list[float]:
    """TFLOP of one forward of all clips by layer; embedding with the first, head with the last, and what runs
    between blocks with the layer that it is computed with."""
    sizes = [(clip.tokens, clip.text) for clip in clips] or [(32760, 512)]

    def total(formula: Formula) -> float:
        return sum(formula(B=1, S=tokens, T=text) for tokens, text in sizes)

    by_class = [total(formula) for formula in _formulas(stage, "block_flops")]
    work = [by_class[number] for number in integers(stage.attrs["classes"])]
    embedding, head = (total(formula) for formula in _formulas(stage, "end_flops"))
    work[0] += embedding
    work[-1] += head
    for layer, cost in _costs_between(stage, "flops"):
        work[layer] += total(cost)
    return work


def parts_of(stage: Stage, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """The stages ``@name_0``, ``@name_1``, ... of a stage and its cuts."""
    bounds = [0, *cuts, len(layers_of(stage))]
    parts = [_part(stage, bounds, number) for number in range(len(bounds) - 1)]
    first = next((i for i, part in enumerate(parts) if _trained(part)), 0)
    return tuple(replace(part, trained=number >= first) for number, part in enumerate(parts))


def on_ranks(parts: Sequence[Stage], replicas: Sequence[int], module: Module) -> tuple[Stage, ...]:
    """The stages in their places: so many ranks each, in order. Raises UserError where these are not the cluster's."""
    world = module.cluster.world if module.cluster else 0
    if len(replicas) != len(parts) or min(replicas) < 1 or sum(replicas) > world:
        ranks = counted(sum(replicas), "rank")
        raise user_error(
            f"replicas {list(replicas)} are for {len(replicas)} stages on {ranks}, and there are {len(parts)} on "
            f"{world}",
            help=f"give every stage a number of ranks, 1 at least, {world} in all at most",
        )
    places = pairwise([0, *accumulate(replicas)])
    return tuple(
        replace(part, attrs=part.attrs.updated(place=tuple(range(*place))))
        for part, place in zip(parts, places, strict=True)
    )


def _trained(part: Stage) -> int:
    return integer(part.attrs.get("trained", part.attrs["params"]))


def _part(stage: Stage, bounds: Sequence[int], number: int) -> Stage:
    """The stage that runs the layers from one of the ``bounds`` to the next, that one excluded."""
    attrs, layers, (begin, end) = stage.attrs, layers_of(stage), bounds[number : number + 2]
    last = end == len(layers)
    ends = [i for i, there in enumerate((begin == 0, last)) if there]
    classes = integers(attrs["classes"])[begin:end]
    counts = {kind: classes.count(kind) for kind in dict.fromkeys(classes)}

    def blocks(name: str, unit: str, times: Sequence[tuple[int, int]]) -> Formula:
        formulas = _formulas(stage, name)
        return formula_sum([(count, formulas[kind]) for kind, count in times], unit)

    def outside(name: str, unit: str) -> Formula:
        formulas = _formulas(stage, f"end_{name}")
        own = [(1, cost) for layer, cost in _costs_between(stage, name) if begin <= layer < end]
        return formula_sum([*((1, formulas[i]) for i in ends), *own], unit)

    every, once = list(counts.items()), [(kind, 1) for kind in counts]
    kept = formula_sum([(1, outside("saved", "GiB")), (1, _largest(stage, "block_shared", once))], "GiB")
    recomputed = [(1, kept), (1, blocks("block_inputs", "GiB", every)), (1, _largest(stage, "block_saved", once))]
    tied, tensors = _tied(stage, bounds[1:-1], number), tensors_of_part(stage, bounds, number)
    params, trained = _counts(stage, bounds, number) if tensors is None else (tensors.params, tensors.trained)
    cell = integer(attrs.get("cell", 1)) if trained else 1
    attentions = sum(integers(attrs["block_attentions"])[kind] * count for kind, count in every)
    names = attrs["blocks"]
    assert isinstance(names, tuple)
    part = Stage(
        f"{stage.name}_{number}",
        trained=stage.trained,
        attrs=Attributes.of(
            source=attrs.get("source"),
            params=params,
            dtype=attrs.get("dtype"),
            trained=None if trained == params else trained,
            blocks=tuple((names[kind][0], count) for kind, count in every),  # type: ignore[index]
            layers=tuple(layers[begin:end]),
            hidden=attrs.get("hidden"),
            heads=_heads(stage, counts),
            attentions=attentions or None,
            joint=attrs.get("joint"),
            flops=formula_sum([(1, blocks("block_flops", "TFLOP", every)), (1, outside("flops", "TFLOP"))], "TFLOP"),
            recomputing=_largest(stage, "block_saved", once),
            spared=_spared(stage, classes),
            shell=outside("saved", "GiB"),
            head=attrs.get("head") if last else None,
            batch=attrs.get("batch"),
            saved=formula_sum([(1, kept), (1, blocks("block_saved", "GiB", every))], "GiB"),
            saved_recompute=formula_sum(recomputed, "GiB"),
            workspace=_largest(stage, "block_workspace", once),
            traffic=blocks("block_traffic", "GiB", every) if attentions else None,
            state=Quantity(0.0, "GiB") if "state" in attrs else None,
            optimizer=Quantity(0.0, "GiB") if "optimizer" in attrs else None,
            cell=cell if cell > 1 else None,
            gradients=attrs.get("gradients") if trained else None,
            degrees=attrs.get("degrees"),
            most_clips=attrs.get("most_clips"),
            output=None if last else _behind(stage, "cuts", end - 1),
            output_tokens=None if last or TOKEN_CUTS not in attrs else _behind(stage, TOKEN_CUTS, end - 1),
            part_of=stage.name,
            tied=tied or None,
            **_sparse(stage, begin, end),
        ),
    )
    if tensors is None:
        return _sums(stage, params, trained).place(part) if "state" in attrs else part
    return place(part, **tensor_attributes(tensors.layers, tensors.outside), unsharded=attrs.get("unsharded"))


def _heads(stage: Stage, kinds: Iterable[int]) -> int | None:
    """Of the attentions of these classes of blocks, the least; None where only other classes have attentions."""
    heads, attentions = (integers(stage.attrs[name]) for name in ("block_heads", "block_attentions"))
    if "heads" not in stage.attrs:
        return None
    return min((heads[kind] for kind in kinds if attentions[kind] or not any(attentions)), default=None)


def _counts(stage: Stage, bounds: Sequence[int], number: int) -> tuple[int, int]:
    """Parameters of a part of a stage that does not list its tensors, and how many of them train. What several parts
    read is counted with each of them, and with the first."""
    layers, (begin, end) = layers_of(stage), bounds[number : number + 2]
    ends = [i for i, there in enumerate((begin == 0, end == len(layers))) if there]
    outside = [*(_ends(stage)[i] for i in ends), *_between(stage, bounds[1:-1], number)]
    if number:
        outside += [(count, count) for _, count in tied_sets(_tied(stage, bounds[1:-1], number))]
    params = sum(integers(stage.attrs["layer_params"])[begin:end]) + sum(count for count, _ in outside)
    return params, sum(count for _, count in layers[begin:end]) + sum(train for _, train in outside)


def _sparse(stage: Stage, begin: int, end: int) -> dict[str, Value | None]:
    """What a part of a stage with densities says of its own layers."""
    if "density" not in stage.attrs:
        return {}
    pairs = [squared(block) for block in _formulas(stage, "block_flops")]
    work = [pairs[kind] for kind in integers(stage.attrs["classes"])]
    share = sum(work[begin:end]) / sum(work)
    rows = density_rows(part_densities(layer_densities(stage), begin, end, share)) if share else ()
    if not rows:
        return {}
    every, own = layer_densities(stage), layer_densities(Stage(stage.name, True, Attributes.of(density=rows)))
    learned = stage.attrs.get("predictors")
    predictors = None if learned is None else integer(learned) * len(own) // len(every)
    return {"density": rows, "predictors": predictors, **{name: stage.attrs.get(name) for name in CHOICE}}


def _tied(stage: Stage, cuts: Sequence[int], number: int) -> tuple[Value, ...]:
    """The parts that read parameters of this one, by their numbers, and how many of these parameters train."""
    counts: Counter[tuple[int, ...]] = Counter()
    for layers, count in tied_sets(stage.attrs.get(TIED)):
        parts = tuple(sorted({bisect_right(cuts, layer) for layer in layers}))
        if len(parts) > 1 and number in parts:
            counts[parts] += count
    return tuple(sorted(counts.items()))


def _spared(stage: Stage, classes: Sequence[int]) -> tuple[Value, ...] | None:
    """Runs of layers of these classes, and what recomputing each saves; None where all save the same."""
    pairs = zip(_formulas(stage, "block_saved"), _formulas(stage, "block_inputs"), strict=True)
    saves = [non_negative(formula_sum([(1, saved), (-1, inputs)], "GiB")) for saved, inputs in pairs]
    runs = [(len(list(run)), saves[kind]) for kind, run in groupby(classes)]
    return tuple(runs) if len(runs) > 1 else None


def _behind(stage: Stage, name: str, layer: int) -> Formula:
    """GiB that go on behind a layer, or of them what blocks make of tokens."""
    runs = stage.attrs[name]
    assert isinstance(runs, tuple)
    for run in runs:
        assert isinstance(run, tuple)
        layer -= integer(run[0])
        if layer < 0:
            return formula(run[1])
    raise ValueError(f"@{stage.name} says of no such layer what goes on behind it")


def _sums(stage: Stage, params: int, trained: int) -> Sums:
    """A part's share of the parameters, and of those that train, wherever the whole lies."""
    whole = Sums.of(stage)
    every = integer(stage.attrs["params"])
    every_trained = integer(stage.attrs.get("trained", every))
    others = whole.others * (params + trained) / max(1, every + every_trained)
    return Sums(others, whole.optimizer * trained / max(1, every_trained))


def _between(stage: Stage, cuts: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Parameters in no block that this part alone reads, and how many train. ``end_params`` count them with the
    embedding: the first part lacks those of another."""
    groups = stage.attrs.get(BETWEEN) or ()
    assert isinstance(groups, tuple)
    own: list[tuple[int, int]] = []
    for group in groups:
        assert isinstance(group, tuple)
        parts = {bisect_right(cuts, layer) for layer in integers(group[0])}
        params, trained = integer(group[1]), integer(group[2])
        if len(parts) == 1 and 0 not in parts and number in (0, *parts):
            own.append((params, trained) if number else (-params, -trained))
    return own


def _costs_between(stage: Stage, name: str) -> list[tuple[int, Formula]]:
    """``flops`` or ``saved`` of what runs between blocks, by layer."""
    pairs = stage.attrs.get(f"between_{name}") or ()
    assert isinstance(pairs, tuple)
    return [(integer(pair[0]), formula(pair[1])) for pair in pairs if isinstance(pair, tuple)]


def _ends(stage: Stage) -> tuple[tuple[int, int], tuple[int, int]]:
    pairs = stage.attrs["end_params"]
    assert isinstance(pairs, tuple)
    first, second = (integers(pair) for pair in pairs)
    return (first[0], first[1]), (second[0], second[1])


def _formulas(stage: Stage, name: str) -> list[Formula]:
    values: Value = stage.attrs[name]
    assert isinstance(values, tuple)
    return [formula(value) for value in values]


def _largest(stage: Stage, name: str, once: Sequence[tuple[int, int]]) -> Formula:
    """The class that needs most for one long clip."""
    formulas = _formulas(stage, name)
    return max((formulas[kind] for kind, _ in once), key=lambda size: size(B=1, S=32760, T=512))
