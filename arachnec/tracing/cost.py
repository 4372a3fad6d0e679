"""Stage attributes. In: a captured model, or an encoder. Out: a ``Stage`` with formulas in B, S and T."""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import sympy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Stage
from arachnec.ir.state_placement import place
from arachnec.ir.tables import UNCUT
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term, Value, non_negative
from arachnec.models.batch import prediction_of
from arachnec.tracing.captured import CapturedModel, chained_inputs
from arachnec.tracing.dataflow import CannotFollow, Cut, Dataflow, record_dataflow, single_blocks
from arachnec.tracing.dims import B, S, T, counts_captions
from arachnec.tracing.flops import AttentionCost, block_flops, token_attentions
from arachnec.tracing.graph import dtype_name
from arachnec.tracing.layers import layer_of_parameters, tensor_sizes
from arachnec.tracing.memory import (
    BlockMemory,
    block_memory,
    encoder_polynomial,
    exact_encoder_polynomial,
    fit_polynomial,
)
from arachnec.tracing.record import ExampleCall
from arachnec.tracing.shell import Measured, measure_encoder, measure_shell, without_blocks

GIB = 2**30
TERA = 10**12


def polynomial(expression: sympy.Expr, unit: str, scale: int) -> Formula:
    """A sympy polynomial in B, S and T, divided by ``scale``, as the IR's formula; highest powers first."""
    expression = sympy.expand(expression)
    if not expression.is_polynomial(B, S, T):  # sizes that were divided and rounded: what it comes to at even ones
        points = [{B: b, S: s, T: t} for b in (1, 2) for s in (4096, 5120, 7168) for t in (64, 224)]
        expression = fit_polynomial([float(expression.subs(point)) for point in points], points)
    poly = sympy.Poly(expression, B, S, T)
    terms = []
    for powers, coefficient in sorted(poly.terms(), key=lambda term: (-sum(term[0][1:]), [-p for p in term[0][1:]])):
        value = float(coefficient) / scale
        if value and math.isfinite(value):
            named = tuple((name, power) for name, power in zip("BST", powers, strict=True) if power)
            terms.append(Term(value, named))
    return Formula(tuple(terms), unit)


def stage_figures(
    model: nn.Module,
    captured: CapturedModel,
    calls: Sequence[ExampleCall],
    shell: Sequence[Measured],
    memories: Sequence[BlockMemory],
    numbers: dict[sympy.Symbol, int],
) -> dict[str, Value | None]:
    """Attributes of ``ir.tables.FIGURES``; why there are none for a model that cannot be cut, because it calls a block
    twice or what its units make cannot be followed."""
    paths = [call.path for call in captured.calls]
    path, times = Counter(paths).most_common(1)[0]
    unread = tensor_sizes(model, tuple(dict.fromkeys(paths)), {})
    if times > 1:
        return {UNCUT: f"block `{path}` is called {times} times in a forward", **unread}
    try:
        flows = [
            record_dataflow(model, paths, call.arguments, prediction_of, without_blocks(model, captured, call))
            for call in calls
        ]
        cuts = [Cut(flow, single_blocks(paths)) for flow in flows]
        handed = [[cut.bytes_on(layer) for layer in range(len(paths) - 1)] for cut in cuts]
        of_blocks = [[cut.block_bytes_on(layer) for layer in range(len(paths) - 1)] for cut in cuts]
    except UserError as refusal:
        return {UNCUT: _reason(refusal), **unread}
    points = [size.values for size in captured.sizes]

    def formula(expression: sympy.Expr, unit: str, scale: int) -> Formula:
        return polynomial(sympy.expand(expression).subs(numbers), unit, scale)

    def measured(values: Sequence[int], unit: str, scale: int) -> Formula:
        return polynomial(fit_polynomial(values, points), unit, scale)

    def ends(figure: str, unit: str, scale: int) -> tuple[Value, ...]:
        return tuple(
            measured([getattr(r, f"{figure}_{end}") for r in shell], unit, scale) for end in ("before", "after")
        )

    def between(figure: int, unit: str, scale: int) -> tuple[Value, ...] | None:
        """Of what lies between the blocks, by the layer that it is computed with."""
        series = zip(*(run.between for run in shell), strict=True)
        by_layer = [[pair[figure] for pair in pairs] for pairs in series]
        return tuple((n, measured(values, unit, scale)) for n, values in enumerate(by_layer) if any(values)) or None

    attentions = [token_attentions(block) for block in captured.blocks]
    before, after = _ends(model, flows[0])
    return {
        "classes": tuple(call.block for call in captured.calls),
        "layer_params": tuple(_count(model.get_submodule(path).parameters()) for path in paths),
        "block_flops": tuple(formula(block_flops(block), "TFLOP", TERA) for block in captured.blocks),
        "block_saved": tuple(formula(memory.saved, "GiB", GIB) for memory in memories),
        "block_inputs": tuple(formula(memory.chained, "GiB", GIB) for memory in memories),
        "block_shared": tuple(formula(memory.shared, "GiB", GIB) for memory in memories),
        "block_workspace": tuple(formula(memory.workspace, "GiB", GIB) for memory in memories),
        "block_traffic": tuple(
            formula(sum((cost.traffic for cost in costs), sympy.Integer(0)), "GiB", GIB) for costs in attentions
        ),
        "block_attentions": tuple(len(costs) for costs in attentions),
        "block_heads": tuple(
            min((int(cost.heads) for cost in costs if cost.heads.is_Integer), default=1) for costs in attentions
        ),
        "end_params": (before, after),
        "end_flops": ends("flops", "TFLOP", TERA),
        "end_saved": ends("saved", "GiB", GIB),
        "cuts": tuple(
            (len(list(run)), measured(series, "GiB", GIB)) for series, run in groupby(zip(*handed, strict=True))
        ),
        "token_cuts": tuple(
            (len(list(run)), _of_tokens(measured(series, "GiB", GIB)))
            for series, run in groupby(zip(*of_blocks, strict=True))
        ),
        **tensor_sizes(model, paths, readers_of(cuts[0])),
        "tied_layers": _tied(model, cuts[0]) or None,
        "between_params": _between(model, cuts[0]) or None,
        "between_flops": between(0, "TFLOP", TERA),
        "between_saved": between(1, "GiB", GIB),
    }


def _reason(refusal: UserError) -> str:
    first = refusal.diagnostics[0]
    return f"`{first.path}` {first.reason}" if isinstance(first, CannotFollow) else str(refusal)


def _of_tokens(size: Formula) -> Formula:
    """What grows with a clip's tokens."""
    return Formula(tuple(term for term in size.terms if any(symbol == "S" for symbol, _ in term.powers)), size.unit)


def readers_of(cut: Cut) -> dict[str, list[int]]:
    """The layers that every parameter is read with. ``cut`` has a stage for every layer."""
    readers: dict[str, list[int]] = defaultdict(list)
    for number, names in enumerate(cut.parameters):
        for name in names:
            readers[name].append(number)
    return readers


def _tied(model: nn.Module, cut: Cut) -> tuple[Value, ...]:
    """The layers that read the same parameters, and how many of these train. ``cut`` has a stage for every layer."""
    counts: Counter[tuple[int, ...]] = Counter()
    for name, parameter in model.named_parameters():
        layers = tuple(number for number, names in enumerate(cut.parameters) if name in names)
        if len(layers) > 1 and parameter.requires_grad:
            counts[layers] += parameter.numel()
    return tuple(sorted(counts.items()))


def _ends(model: nn.Module, flow: Dataflow) -> tuple[tuple[int, int], tuple[int, int]]:
    """Parameters, and how many train, of what runs with all blocks but the last, and of the rest; blocks apart."""
    parameters = dict(model.named_parameters())
    blocks = {name for call in flow.calls if call.is_block for name in call.parameters}
    last = next(call.path for call in reversed(flow.calls) if call.is_block)
    first = tuple(call.path for call in flow.calls if call.is_block and call.path != last)
    cut = Cut(flow, (first, (last,)))
    tail = cut.parameters[1] - blocks
    head = [parameters[name] for name in parameters if name not in blocks and name not in tail]
    return _counts(head), _counts([parameters[name] for name in sorted(tail)])


def _between(model: nn.Module, cut: Cut) -> tuple[Value, ...]:
    """What lies in no block, and is read neither with the first nor with the last: by which layers, how many
    parameters, and how many train. ``cut`` has a stage for every layer."""
    blocks = {name for call in cut.flow.calls if call.is_block for name in call.parameters}
    groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        layers = tuple(number for number, names in enumerate(cut.parameters) if name in names)
        if name not in blocks and layers and layers[0] > 0 and layers[-1] < len(cut.parts) - 1:
            groups[layers].append(parameter)
    return tuple((layers, *_counts(parameters)) for layers, parameters in sorted(groups.items()))


def _counts(parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    return _count(parameters), _count(p for p in parameters if p.requires_grad)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def trained_stage(
    name: str,
    model: nn.Module,
    captured: CapturedModel,
    calls: Sequence[ExampleCall],
    *,
    source: str,
    gpu: bool = False,
) -> Stage:
    """The transformer: blocks from their graphs, the rest from running the model around them."""
    counts = [sum(call.block == i for call in captured.calls) for i in range(len(captured.blocks))]
    attentions = [token_attentions(block) for block in captured.blocks]
    memories = [block_memory(block, chained_inputs(captured, i), gpu=gpu) for i, block in enumerate(captured.blocks)]
    numbers = _numbers(captured)
    shell = [measure_shell(model, captured, call) for call in calls]
    points = [size.values for size in captured.sizes]
    figures = stage_figures(model, captured, calls, shell, memories, numbers)
    outside = {field: fit_polynomial([getattr(m, field) for m in shell], points) for field in ("flops", "saved")}
    flops = sum((n * block_flops(block) for n, block in zip(counts, captured.blocks, strict=True)), outside["flops"])
    every = [cost for n, costs in zip(counts, attentions, strict=True) for cost in costs * n]
    saved, recomputed, workspace = _memory(counts, memories)
    parameters = list(model.parameters())
    stage = Stage(
        name,
        trained=True,
        attrs=Attributes.of(
            source=source,
            params=sum(p.numel() for p in parameters),
            trained=None if all(p.requires_grad for p in parameters) else _counts(parameters)[1],
            dtype=dtype_name(dtype_of(model)),
            layers=layers_in_order(model, captured),
            blocks=tuple((Symbol(block.name), n) for n, block in zip(counts, captured.blocks, strict=True)),
            hidden=_hidden(captured),
            heads=min((int(cost.heads) if cost.heads.is_Integer else 1 for cost in every), default=None),
            attentions=len(every) or None,
            joint=any(cost.joint for cost in every),
            captioned=True if counts_captions(captured.sizes) else None,
            flops=polynomial(flops.subs(numbers), "TFLOP", TERA),
            saved=polynomial((saved + outside["saved"]).subs(numbers), "GiB", GIB),
            saved_recompute=polynomial((recomputed + outside["saved"]).subs(numbers), "GiB", GIB),
            spared=_spared(captured, memories, numbers),
            recomputing=polynomial(_largest([memory.saved for memory in memories]).subs(numbers), "GiB", GIB),
            shell=polynomial(outside["saved"].subs(numbers), "GiB", GIB),
            head=_head(shell, points, numbers),
            workspace=polynomial(workspace.subs(numbers), "GiB", GIB),
            batch=polynomial(fit_polynomial([batch_bytes(call) for call in calls], points), "GiB", GIB),
            traffic=_traffic(every, numbers),
            state=Quantity(0.0, "GiB"),
            optimizer=Quantity(0.0, "GiB"),
            **figures,
        ),
    )
    return place(stage)


def _head(
    shell: Sequence[Measured], points: Sequence[dict[sympy.Symbol, int]], numbers: dict[sympy.Symbol, int]
) -> tuple[Formula, Formula]:
    """What lies behind the last block: kept for the backward, and the most alive while it runs."""
    kept, alive = [run.saved_after for run in shell], [run.peak_after for run in shell]

    def measured(values: Sequence[int]) -> Formula:
        return polynomial(fit_polynomial(values, points).subs(numbers), "GiB", GIB)

    return measured(kept), measured([max(pair) for pair in zip(kept, alive, strict=True)])


def batch_bytes(call: ExampleCall) -> int:
    """Of the arguments as ``sample`` gives them, and of a target that is taken to be as large as the largest."""
    sizes = [value.numel() * value.element_size() for value in tree_leaves(call.arguments) if isinstance(value, Tensor)]
    return sum(sizes) + max(sizes, default=0)


def layers_in_order(model: nn.Module, captured: CapturedModel) -> tuple[tuple[str, int], ...]:
    """The path of every block in the order of the forward, with the parameters that train in it and nowhere else."""
    paths = tuple(dict.fromkeys(call.path for call in captured.calls))
    parameters = dict(model.named_parameters())
    counts = [0] * len(paths)
    for name, layer in layer_of_parameters(model, paths).items():
        if layer is not None:
            counts[layer] += parameters[name].numel()
    return tuple(zip(paths, counts, strict=True))


def _memory(counts: Sequence[int], memories: Sequence[BlockMemory]) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Bytes saved by all blocks; saved with recomputation (all inputs, and one block in full); workspace."""
    zero = sympy.Integer(0)
    shared = _largest([memory.shared for memory in memories])
    saved = sum((n * memory.saved for n, memory in zip(counts, memories, strict=True)), zero)
    inputs = sum((n * memory.chained for n, memory in zip(counts, memories, strict=True)), zero)
    once = _largest([memory.saved for memory in memories])
    return saved + shared, inputs + once + shared, _largest([memory.workspace for memory in memories])


def _spared(
    captured: CapturedModel, memories: Sequence[BlockMemory], numbers: dict[sympy.Symbol, int]
) -> tuple[Value, ...] | None:
    """Runs of layers, in the order of the forward, and what recomputing each saves; None where all save the same.

    Nothing where a layer keeps no more than its input: no gradient passes it, or it is a frozen one.
    """
    layers: dict[str, sympy.Expr] = {}
    for call in captured.calls:
        saves = memories[call.block].saved - memories[call.block].chained
        layers[call.path] = sympy.expand(layers.get(call.path, sympy.Integer(0)) + saves)
    runs = [(len(list(run)), saves) for saves, run in groupby(layers.values())]
    if len(runs) < 2:
        return None
    return tuple((count, non_negative(polynomial(saves.subs(numbers), "GiB", GIB))) for count, saves in runs)


def _largest(expressions: Sequence[sympy.Expr]) -> sympy.Expr:
    at = {B: 1, S: 32760, T: 512}
    return max(
        expressions, key=lambda e: float(e.subs(at).subs(dict.fromkeys(e.free_symbols, 1))), default=sympy.Integer(0)
    )


def _traffic(costs: Sequence[AttentionCost], numbers: dict[sympy.Symbol, int]) -> Formula | None:
    if not costs:
        return None
    return polynomial(sympy.expand(sum(cost.traffic for cost in costs)).subs(numbers), "GiB", GIB)


def _hidden(captured: CapturedModel) -> int | None:
    for dims in captured.blocks[0].input_dims:
        if any(S in size.free_symbols for size in dims) and dims[-1].is_Integer:
            return int(dims[-1])
    return None


def _numbers(captured: CapturedModel) -> dict[sympy.Symbol, int]:
    """Sizes that are no combination of B, S and T, at the largest recording: a formula cannot follow them."""
    numbers: dict[sympy.Symbol, int] = {}
    for block in captured.blocks:
        largest = max(block.examples, key=lambda example: example[S])
        numbers |= {symbol: value for symbol, value in largest.items() if symbol not in (B, S, T)}
    return numbers


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of most of the parameters."""
    counts: dict[object, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=counts.__getitem__)  # type: ignore[return-value]


def encoder_stage(
    name: str, encoder: nn.Module, clips: Sequence[VideoClip], tokens: Callable[[VideoClip], int]
) -> Stage:
    """A frozen encoder: what it computes and hands off, by the clips it was measured on."""
    chosen = spread(clips, tokens)
    runs = [measure_encoder(encoder, clip) for clip in chosen]
    points = [{B: 1, S: tokens(clip), T: clip.text_tokens} for clip in chosen]
    for clip in _crossed(chosen):
        with contextlib.suppress(Exception):  # a clip that nobody has need not be one that the encoder takes
            measured = measure_encoder(encoder, clip)
            points.append({B: 1, S: tokens(clip), T: clip.text_tokens})
            runs.append(measured)

    def formula(values: Sequence[int], unit: str, scale: int) -> Formula:
        own = len(chosen)
        fitted = exact_encoder_polynomial(values, points) or encoder_polynomial(values[:own], points[:own])
        return polynomial(sympy.expand(B * fitted), unit, scale)

    parameters = [*encoder.parameters(), *encoder.buffers()]
    return Stage(
        name,
        trained=False,
        attrs=Attributes.of(
            source=type(encoder).__name__,
            params=sum(p.numel() for p in encoder.parameters()),
            dtype=dtype_name(dtype_of(encoder)) if any(True for _ in encoder.parameters()) else None,
            flops=formula([run.flops for run in runs], "TFLOP", TERA),
            workspace=formula([run.peak for run in runs], "GiB", GIB),
            state=Quantity(sum(p.numel() * p.dtype.itemsize for p in parameters) / GIB, "GiB"),
            output=formula([run.output for run in runs], "GiB", GIB),
        ),
    )


def _crossed(clips: Sequence[VideoClip]) -> list[VideoClip]:
    """The smallest and the largest clip with each other's caption: what tells S from T where they grow together."""
    small, large = clips[0], clips[-1]
    if small.text_tokens == large.text_tokens or small.shape[:3] == large.shape[:3]:
        return []
    return [_captioned(large, small), _captioned(small, large)]


def _captioned(clip: VideoClip, other: VideoClip) -> VideoClip:
    """The clip with what another has of a text."""
    return replace(
        clip, text_tokens=other.text_tokens, caption=other.caption, captions=other.captions, cached=other.cached,
        encoded=other.encoded,
    )  # fmt: skip


def spread(clips: Sequence[VideoClip], tokens: Callable[[VideoClip], int]) -> list[VideoClip]:
    """Up to six clips that differ in S and T, the smallest and the largest among them."""
    distinct = sorted({clip.shape: clip for clip in clips}.values(), key=lambda clip: (tokens(clip), clip.text_tokens))
    count = min(6, len(distinct))
    return [distinct[round(i * (len(distinct) - 1) / max(1, count - 1))] for i in range(count)]
