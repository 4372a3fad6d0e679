"""What a stage that is cut needs to know of its parts. In: a captured model. Out: the stage's attributes by name.

Figures are per block class, for the embedding and the head, and for what goes on behind every layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

import sympy
from torch import nn

from arachnec.ir.diagnostic import UserError
from arachnec.ir.tables import UNCUT
from arachnec.ir.values import Formula, Value
from arachnec.models.batch import prediction_of
from arachnec.tracing.captured import CapturedModel
from arachnec.tracing.dataflow import CannotFollow, Cut, Dataflow, record_dataflow, single_blocks
from arachnec.tracing.flops import block_flops, token_attentions
from arachnec.tracing.formulas import GIB, TERA, polynomial
from arachnec.tracing.layers import tensor_sizes
from arachnec.tracing.memory import BlockMemory, fit_polynomial
from arachnec.tracing.record import ExampleCall
from arachnec.tracing.shell import Measured, without_blocks


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
        "end_flops": (
            measured([run.flops_before for run in shell], "TFLOP", TERA),
            measured([run.flops_after for run in shell], "TFLOP", TERA),
        ),
        "end_saved": (
            measured([run.saved_before for run in shell], "GiB", GIB),
            measured([run.saved_after for run in shell], "GiB", GIB),
        ),
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
    return _count(parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
