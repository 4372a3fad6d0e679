"""Block capture. In: a model and example calls. Out: one graph per block structure, its dimensions in B, S and T.

The blocks are the classes that the model names in ``_repeated_blocks`` or ``_no_split_modules`` (a convention of
Diffusers), else the members of its ``ModuleList``s. Two blocks have one structure when class, module tree, parameters,
buffers and scalar settings are equal. They share one graph, which runs with each block's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from arachnec.ir.diagnostic import UserError
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.tracing.captured import (
    CapturedBlock,
    CapturedCall,
    CapturedModel,
    Dims,
    Origin,
    Slot,
    TokenPlace,
    call_lifted,
    lifted,
    same_value,
)
from arachnec.tracing.dims import S, Sizes, T, fit_dimension, moves_with
from arachnec.tracing.errors import (
    cannot_capture_error,
    no_token_dimension_error,
    not_captured,
    unequal_call_error,
)
from arachnec.tracing.export import PREFIX, FlatBlock, export_block, forget_weights, refuse_dropout_modules
from arachnec.tracing.find import Unread, find_blocks, structure, unread_settings
from arachnec.tracing.record import BlockCall, ExampleCall, Recording, Repeats, flatten_call, is_meta, record, run_once
from arachnec.tracing.verify import example_inputs, unfilled, verify_block

MODEL = ""  # the path of the model itself among its modules

__all__ = [
    "CapturedBlock",
    "CapturedCall",
    "CapturedModel",
    "Origin",
    "Slot",
    "call_lifted",
    "capture_blocks",
    "lifted",
    "whole_blocks",
]


def capture_blocks(
    model: nn.Module,
    examples: Sequence[ExampleCall],
    *,
    at: Sequence[ExampleCall] = (),
    verify: bool = True,
    gradients: bool = True,
    reporter: Reporter = unreported,
) -> CapturedModel:
    """Capture the blocks of ``model``, on any device, meta included.

    ``examples`` vary one thing at a time: the first is exported (a batch of 2 or more, all sizes distinct); another
    clip shape, another caption length, another batch tell which dimension is which; at the last, different in all of
    them, each graph is compared with eager, and its ``gradients`` too where it trains. With ``at``, calls that differ
    in their batch alone, the graphs are for clips of that one shape. Raises ``UserError`` for a model that cannot be
    captured.
    """
    recorded = record_blocks(model, examples)
    for call in recorded.recordings[0].calls:
        if call.rewritten:
            raise not_captured(
                f"{call.path} puts a tensor that it does not return into an object that it is given",
                help="return what the block computes, and let the model take it from there",
            )
    groups = recorded.groups
    there = [recorded.again(model, example, grad=i == 0) for i, example in enumerate(at)]
    _refuse_unequal(model, [*recorded.recordings[:1], *there])
    blocks = []
    for number, (name, members) in enumerate(zip(*groups, strict=True), 1):
        reporter(f"{'verifying' if verify else 'tracing'} block {number} of {len(groups[0])}")
        blocks.append(_capture(name, recorded, members, there, at, verify=verify, gradients=gradients))
    return _model(tuple(blocks), groups[1], recorded)


def whole_blocks(model: nn.Module, examples: Sequence[ExampleCall]) -> CapturedModel:
    """The calls of the blocks without a graph of them, of a model without blocks none.

    Raises ``UserError`` for a model that cannot be run, or none of whose inputs grows with the clip.
    """
    recorded = record_blocks(model, examples, whole=True)
    return _model((), recorded.groups[1], recorded)


@dataclass(frozen=True, eq=False)
class RecordedBlocks:
    """Every example's recording, its sizes with S, and where S is read."""

    candidates: dict[str, nn.Module]
    unread: Unread
    repeats: Repeats
    recordings: tuple[Recording, ...]
    sizes: tuple[Sizes, ...]
    tokens_at: TokenPlace

    @property
    def groups(self) -> tuple[list[str], list[list[int]]]:
        """A name and the calls of each structure, blocks without tokens left out."""
        if self.tokens_at.path == MODEL:
            return [], [list(range(len(self.recordings[0].calls)))]
        groups: dict[Any, list[int]] = {}
        for i, call in enumerate(self.recordings[0].calls):
            if _has_tokens(self.recordings, i, self.sizes):
                groups.setdefault(_key(self.candidates[call.path], self.unread, self.recordings, i), []).append(i)
        firsts = [self.candidates[self.recordings[0].calls[members[0]].path] for members in groups.values()]
        return _names(firsts), list(groups.values())

    def sizes_at(self, recordings: Sequence[Recording], examples: Sequence[ExampleCall]) -> tuple[Sizes, ...]:
        """Those of further recordings."""
        place = self.tokens_at
        tokens = [place.read(next(c.leaves for c in r.calls if c.path == place.path)) for r in recordings]
        return tuple(Sizes(e.clip, e.batch, e.text, s) for e, s in zip(examples, tokens, strict=True))

    def again(self, model: nn.Module, example: ExampleCall, *, grad: bool) -> Recording:
        return record(model, self.candidates, example, self.repeats, grad=grad)


def record_blocks(model: nn.Module, examples: Sequence[ExampleCall], *, whole: bool = False) -> RecordedBlocks:
    """Run every example. Raises ``UserError`` for a model without blocks, or whose calls have different forms; where
    the blocks run ``whole`` they need not be there, be alike or see tokens."""
    refuse_dropout_modules(model)
    candidates = find_blocks(model)
    if not candidates and not whole:
        raise not_captured(
            f"{type(model).__name__} has no repeated blocks",
            help="keep the transformer blocks in an nn.ModuleList, or name their classes in a class attribute "
            "`_repeated_blocks = [...]` of the model",
        )
    unread = unread_settings(candidates, lambda: run_once(model, examples[0]))
    repeats = Repeats(model, candidates, unread)
    recordings = [record(model, candidates, example, repeats, grad=i == 0) for i, example in enumerate(examples)]
    if whole:
        tokens = _tokens_of_whole(model, recordings, examples)
        return RecordedBlocks(candidates, unread, repeats, tuple(recordings), *tokens)
    if not recordings[0].calls:
        names = ", ".join(sorted({type(block).__name__ for block in candidates.values()}))
        raise not_captured(
            f"the forward of {type(model).__name__} calls none of its blocks ({names}) as modules",
            help="call each block as `block(...)`, not `block.forward(...)`",
        )
    _refuse_unequal(model, recordings)
    sizes, place = _with_tokens(recordings, examples)
    return RecordedBlocks(candidates, unread, repeats, tuple(recordings), sizes, place)


def _capture(
    name: str,
    recorded: RecordedBlocks,
    members: Sequence[int],
    there: Sequence[Recording],
    at: Sequence[ExampleCall],
    *,
    verify: bool,
    gradients: bool,
) -> CapturedBlock:
    recordings = there or recorded.recordings
    chosen = _representative(recordings[0], members)
    call = recordings[0].calls[chosen]
    block = recorded.candidates[call.path]
    block = unfilled(block) if is_meta(block) else block
    versions = [recording.calls[chosen] for recording in recordings]
    sizes = recorded.sizes_at(there, at) if there else recorded.sizes
    shapes, others = _dims([version.leaves for version in versions], sizes)
    flat = FlatBlock(block, call.leaves, call.spec)
    inputs = example_inputs(call, block)
    dynamic = [[d for d, size in enumerate(dims) if size.free_symbols] for dims in shapes]
    exported = export_block(name, flat, inputs, dynamic)
    captured = _described(name, exported, recordings, members, shapes, others, sizes)
    if there:
        captured = _for_one_shape(captured, recorded, chosen, sizes[0])
    if verify:
        first = [recording.calls[members[0]] for recording in recordings]
        alike = [x.stride() for x in _tensors(first[0])] == [x.stride() for x in _tensors(versions[0])]
        calls = _different(versions) if alike else [*_different(versions), first[0]]
        last = recordings[0].calls[members[-1]].path  # a graph is to serve blocks that it is not of
        verify_block(captured, recorded.candidates[last], calls, gradients=gradients)
    forget_weights(exported)
    return captured


def _for_one_shape(captured: CapturedBlock, recorded: RecordedBlocks, call: int, at: Sizes) -> CapturedBlock:
    """The graph of one clip shape, with the dimensions of its inputs and outputs as all shapes together tell them."""
    versions = [recording.calls[call] for recording in recorded.recordings]
    inputs, others = _dims([version.leaves for version in versions], recorded.sizes)
    outputs, _ = _dims([version.outputs for version in versions], recorded.sizes, others)
    fixed: dict[sympy.Symbol, int] = {S: at.tokens, T: at.text}
    return replace(captured, input_dims=tuple(inputs), output_dims=tuple(outputs), fixed=fixed)


def _different(versions: Sequence[BlockCall]) -> list[BlockCall]:
    """The last call, and for each size or number in which it equals the exported one, the smallest call that does not.

    A number of frames, say, is frozen into the graph; only a call with another number can show that it matters.
    """
    forms = [
        [part for leaf in version.leaves for part in (leaf.shape if isinstance(leaf, Tensor) else [repr(leaf)])]
        for version in versions
    ]
    chosen = [len(versions) - 1]
    for place, exported in enumerate(forms[0]):
        others = [i for i, form in enumerate(forms) if form[place] != exported]
        if others and not set(others) & set(chosen):
            chosen.append(min(others, key=lambda i: sum(x.numel() for x in _tensors(versions[i]))))
    return [versions[i] for i in chosen]


def _described(
    name: str,
    exported: ExportedProgram,
    recordings: Sequence[Recording],
    members: Sequence[int],
    shapes: Sequence[Dims],
    others: dict[sympy.Symbol, tuple[int, ...]],
    sizes: Sequence[Sizes],
) -> CapturedBlock:
    versions = [recording.calls[members[0]] for recording in recordings]
    call = versions[0]
    slots = _slots(exported)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    nodes = [node for node, slot in zip(placeholders, slots, strict=True) if slot.kind == "input"]
    symbols = _symbols(name, nodes, shapes)
    values = [size.values | {symbol: series[k] for symbol, series in others.items()} for k, size in enumerate(sizes)]
    positions = _tensor_leaves(call.leaves)
    results = exported.graph.output_node().args[0]
    assert isinstance(results, tuple)
    captured = CapturedBlock(
        name=name,
        exported=exported,
        instances=tuple(dict.fromkeys(recordings[0].calls[i].path for i in members)),
        slots=slots,
        input_names=tuple(call.names[i] for i in positions),
        input_dims=tuple(shapes),
        input_leaves=positions,
        input_grads=tuple(call.leaves[i].requires_grad for i in positions),
        output_dims=(),
        output_leaves=_tensor_leaves(call.outputs),
        constants=tuple(
            (i, leaf, all(same_value(version.leaves[i], leaf) for version in versions))
            for i, leaf in enumerate(call.leaves)
            if not isinstance(leaf, Tensor)
        ),
        output_constants=tuple((i, leaf) for i, leaf in enumerate(call.outputs) if not isinstance(leaf, Tensor)),
        spec=call.spec,
        output_spec=call.output_spec,
        symbols=symbols,
        examples=tuple(values),
    )
    bounds = _bounds_of_counts(captured)
    captured = replace(captured, symbols=symbols | bounds, unbacked=frozenset(bounds))
    unknown = {s for node in exported.graph.nodes for e in captured.dims(node) for s in e.free_symbols}
    unknown -= set(values[0])
    if unknown:
        raise cannot_capture_error(name, "the size of a tensor depends on values, not on shapes")
    output_dims = tuple(captured.dims(node) for node in results if isinstance(node, fx.Node))
    object.__setattr__(captured, "output_dims", output_dims)
    return captured


def _bounds_of_counts(captured: CapturedBlock) -> dict[sympy.Symbol, sympy.Expr]:
    """How many places of a mask are not zero is known when it runs; all of them are what it is at most."""
    bounds: dict[sympy.Symbol, sympy.Expr] = {}
    for node in captured.exported.graph.nodes:
        if node.target is torch.ops.aten.nonzero.default:
            count = node.meta["val"].shape[0]
            if isinstance(count, torch.SymInt) and isinstance(count.node.expr, sympy.Symbol):
                bounds[count.node.expr] = sympy.prod(captured.dims(node.args[0]))
    return bounds


def _slots(exported: ExportedProgram) -> tuple[Slot, ...]:
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
        InputKind.USER_INPUT: "input",
    }
    slots, inputs = [], 0
    for spec in exported.graph_signature.input_specs:
        kind = kinds[spec.kind]
        if kind == "input":
            slots.append(Slot(kind, inputs))
            inputs += 1
        else:
            target = str(spec.target)
            slots.append(Slot(kind, target if kind == "constant" else target.removeprefix(PREFIX)))
    return tuple(slots)


def _symbols(name: str, nodes: Sequence[fx.Node], shapes: Sequence[Dims]) -> dict[sympy.Symbol, sympy.Expr]:
    """What each symbol of the graph is, read off the inputs whose dimensions carry it."""
    symbols: dict[sympy.Symbol, sympy.Expr] = {}
    for node, dims in zip(nodes, shapes, strict=True):
        for size, expression in zip(node.meta["val"].shape, dims, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                earlier = symbols.setdefault(size.node.expr, expression)
                if earlier != expression:
                    reason = f"it requires {earlier} = {expression}, which the recordings do not bear out"
                    raise cannot_capture_error(name, reason)
    for node, dims in zip(nodes, shapes, strict=True):
        for size, expression in zip(node.meta["val"].shape, dims, strict=True):
            captured = sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size).subs(symbols)
            if sympy.expand(captured - expression) != 0:
                reason = f"it fixes a size that changes with the clip ({expression} = {captured})"
                raise cannot_capture_error(name, reason)
    return symbols


def _dims(
    versions: Sequence[Sequence[Any]],
    sizes: Sequence[Sizes],
    known: Mapping[sympy.Symbol, tuple[int, ...]] | None = None,
) -> tuple[list[Dims], dict[sympy.Symbol, tuple[int, ...]]]:
    """Every dimension of every tensor among the leaves as an expression; sizes that fit none get a symbol of their
    own, but for those ``known``."""
    others: dict[tuple[int, ...], sympy.Symbol] = {series: symbol for symbol, series in (known or {}).items()}
    shapes: list[Dims] = []
    for leaf in _tensor_leaves(versions[0]):
        dims = []
        for d in range(versions[0][leaf].ndim):
            series = tuple(int(version[leaf].shape[d]) for version in versions)
            fitted = fit_dimension(series, sizes)
            if fitted is None:
                symbol = sympy.Symbol(f"N{len(others)}", integer=True, positive=True)
                fitted = others.setdefault(series, symbol)
            dims.append(fitted)
        shapes.append(tuple(dims))
    return shapes, {symbol: series for series, symbol in others.items()}


def _with_tokens(
    recordings: Sequence[Recording], examples: Sequence[ExampleCall]
) -> tuple[tuple[Sizes, ...], TokenPlace]:
    """S of each recording, and where it is: in the first input of a block with a dimension that follows the clip and
    not the batch, the largest such dimension."""
    sizes = [Sizes(example.clip, example.batch, example.text) for example in examples]
    for index in range(len(recordings[0].calls)):
        versions = [recording.calls[index] for recording in recordings]
        for leaf in _tensor_leaves(versions[0].leaves):
            place = _tokens_of(versions, leaf, sizes)
            if place is not None:
                series = [place.read(version.leaves) for version in versions]
                known = (Sizes(s.clip, s.batch, s.text, value) for s, value in zip(sizes, series, strict=True))
                return tuple(known), place
    call = recordings[0].calls[0]
    inputs = ", ".join(f"{call.names[i]} {list(call.leaves[i].shape)}" for i in _tensor_leaves(call.leaves))
    raise no_token_dimension_error(call.path, inputs)


def _tokens_of_whole(
    model: nn.Module, recordings: Sequence[Recording], examples: Sequence[ExampleCall]
) -> tuple[tuple[Sizes, ...], TokenPlace]:
    """The same, of blocks that no ranks share: where the blocks tell nothing, of the model's own largest argument."""
    try:
        _refuse_unequal(model, recordings)
        if recordings[0].calls:
            return _with_tokens(recordings, examples)
    except UserError:
        pass
    sizes = [Sizes(example.clip, example.batch, example.text) for example in examples]
    versions = [flatten_call(model, (), example.arguments)[0] for example in examples]
    places = []
    for leaf in _tensor_leaves(versions[0]) if len({len(leaves) for leaves in versions}) == 1 else ():
        shapes = [leaves[leaf].shape for leaves in versions]
        series = [[int(size) for size in dims] for dims in zip(*shapes, strict=True)]
        moving = tuple(d for d, values in enumerate(series) if moves_with("clip", values, sizes))
        batched = tuple(d for d, values in enumerate(series) if moves_with("batch", values, sizes))
        if set(moving) - set(batched):
            places.append(TokenPlace(MODEL, leaf, moving[0], tuple(sorted({*moving, *batched})), bool(batched)))
    if not places:
        inputs = ", ".join(str(list(versions[0][leaf].shape)) for leaf in _tensor_leaves(versions[0]))
        raise no_token_dimension_error(type(model).__name__, inputs)
    place = max(places, key=lambda place: place.count(versions[0], examples[0].batch))
    counts = [place.count(leaves, size.batch) for leaves, size in zip(versions, sizes, strict=True)]
    return tuple(replace(size, tokens=count) for size, count in zip(sizes, counts, strict=True)), place


def _tokens_of(versions: Sequence[BlockCall], leaf: int, sizes: Sequence[Sizes]) -> TokenPlace | None:
    """Where one leaf has tokens. What ends in a dimension that moves is a mask or the like: its first one counts."""
    shapes = [version.leaves[leaf].shape for version in versions]
    series = [[int(size) for size in dims] for dims in zip(*shapes, strict=True)]
    moving = [d for d, values in enumerate(series) if moves_with("clip", values, sizes)]
    batched = [d for d, values in enumerate(series) if moves_with("batch", values, sizes)]
    alone = [d for d in moving if d not in batched]
    if not alone:
        return None
    path = versions[0].path
    if len(series) - 1 in moving:
        return TokenPlace(path, leaf, alone[0])
    largest = max(alone, key=lambda d: series[d][0])
    return TokenPlace(path, leaf, largest, tuple(sorted({*moving, *batched})), bool(batched))


def _has_tokens(recordings: Sequence[Recording], index: int, sizes: Sequence[Sizes]) -> bool:
    """Whether a block sees the video at all: the layers of a text refiner do not, and belong to the shell."""
    versions = [recording.calls[index] for recording in recordings]
    return any(
        moves_with("clip", [int(version.leaves[leaf].shape[d]) for version in versions], sizes)
        for leaf in _tensor_leaves(versions[0].leaves)
        for d in range(versions[0].leaves[leaf].ndim)
    )


def _refuse_unequal(model: nn.Module, recordings: Sequence[Recording]) -> None:
    first = recordings[0]
    for other in recordings[1:]:
        paths = [call.path for call in first.calls], [call.path for call in other.calls]
        if paths[0] != paths[1]:
            actual, expected = (f"{len(p)} block calls" for p in reversed(paths))
            raise unequal_call_error(type(model).__name__, actual, expected)
        for a, b in zip(first.calls, other.calls, strict=True):
            if a.spec != b.spec or a.output_spec != b.output_spec:
                raise unequal_call_error(a.path, b.spec, a.spec)


def _key(block: nn.Module, unread: Unread, recordings: Sequence[Recording], index: int) -> Any:
    """Calls with equal keys are calls of one graph: the block's structure and the form of the call."""
    forms = []
    for recording in recordings:
        call = recording.calls[index]
        forms.append(tuple(_form(leaf) for leaf in call.leaves))
    call = recordings[0].calls[index]
    return structure(block, unread), str(call.spec), str(call.output_spec), tuple(forms)


def _form(leaf: Any) -> Any:
    return (str(leaf.dtype), tuple(leaf.shape)) if isinstance(leaf, Tensor) else repr(leaf)


def _representative(recording: Recording, members: Sequence[int]) -> int:
    """The call to export: with strided inputs if there is one, since what copies those also takes contiguous ones."""
    strided = (
        i for i in members if not all(x.is_contiguous() for x in recording.calls[i].leaves if isinstance(x, Tensor))
    )
    return next(strided, members[0])


def _names(blocks: Sequence[nn.Module]) -> list[str]:
    """The classes' names; a class with several structures is numbered from the second on."""
    seen: dict[str, int] = {}
    names = []
    for block in blocks:
        name = type(block).__name__
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return names


def _model(
    blocks: tuple[CapturedBlock, ...], groups: Sequence[Sequence[int]], recorded: RecordedBlocks
) -> CapturedModel:
    recording = recorded.recordings[0]
    block_of = {i: g for g, members in enumerate(groups) for i in members}
    order = {i: k for k, i in enumerate(sorted(block_of))}  # calls of the shell's own modules are left out

    def origin(leaf_origin: tuple[int, int] | None) -> Origin | None:
        if leaf_origin is None or leaf_origin[0] not in order or leaf_origin in recording.escapes:
            return None
        return _as_tensor_output(recording, leaf_origin, order)

    calls = tuple(
        CapturedCall(
            recording.calls[i].path,
            block_of[i],
            tuple(origin(recording.calls[i].origins[leaf]) for leaf in _tensor_leaves(recording.calls[i].leaves)),
        )
        for i in order
    )

    def outputs(of: Iterable[tuple[int, int]]) -> frozenset[Origin]:
        return frozenset(_as_tensor_output(recording, e, order) for e in of if e[0] in order)

    place, escapes, handed = recorded.tokens_at, outputs(recording.escapes), outputs(recording.handed)
    leaves = next((call.leaves for call in recording.calls if call.path == place.path), None)
    tokens = recorded.sizes[0].tokens if leaves is None else place.count(leaves, recorded.sizes[0].batch)
    return CapturedModel(blocks, calls, escapes, recorded.sizes, place, handed, tokens)


def _as_tensor_output(recording: Recording, output: tuple[int, int], order: dict[int, int]) -> Origin:
    return Origin(order[output[0]], _tensor_leaves(recording.calls[output[0]].outputs).index(output[1]))


def _tensor_leaves(leaves: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))


def _tensors(call: BlockCall) -> list[Tensor]:
    return [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
