"""The table of rules: which ops commute with sharding the tokens, on what condition; attention, which combines them.

A rule takes a traced call with at least one sharded operand and adds its counterpart on one rank. It raises MixesTokens
where it cannot prove that this is right; then the operands are gathered. An op that is not in ``RULES`` is pointwise
where torch says so (``torch.Tag.pointwise``), else unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import fx

from arachnec.spmd import runtime as runtime
from arachnec.spmd import shape_rules as shapes
from arachnec.spmd.context import Context, MixesTokens, Refused, Result
from arachnec.spmd.layouts import Layout, Part, Value, alike, same

aten = torch.ops.aten


def attention(context: Context, node: fx.Node) -> Result:
    """``scaled_dot_product_attention``: local where the keys are the same on every rank, else distributed.

    Query [..., Lq, D], key [..., Lk, D], value [..., Lk, Dv]; what stands before may be sharded, if it is alike.
    """
    query, key, value = (context.value(arg) for arg in node.args[:3])
    mask_node = context.argument(node, "attn_mask")
    mask = None if mask_node is None else context.value(mask_node)
    if context.argument(node, "dropout_p", 0.0):
        raise Refused("it drops attention weights at random", "set the attention's dropout to 0")
    if any(x.layouts[-1] is not None for x in (query, key, value)):
        raise MixesTokens("has the tokens in the dimension of the features")
    if any(layout is not None for x in (query, key, value) for layout in x.layouts[:-2]):
        return _attention_of_each(context, node, query, key, value, mask)
    if key.layouts[-2] is None and value.layouts[-2] is None:
        return _local_attention(context, node, query, key, value, mask)
    return _distributed_attention(context, node, query, key, value, mask)


def _options(context: Context, node: fx.Node) -> tuple[bool, Any, bool]:
    scale = context.argument(node, "scale")
    return (
        bool(context.argument(node, "is_causal", False)),
        context.mapped(scale) if isinstance(scale, fx.Node) else scale,
        bool(context.argument(node, "enable_gqa", False)),
    )


def _call(context: Context, node: fx.Node, q: Value, k: Value, v: Value, mask: Value | None, layouts: Any) -> Value:
    causal, scale, gqa = _options(context, node)
    arguments = (q.node, k.node, v.node, None if mask is None else mask.node, 0.0, causal)
    options = {"scale": scale, "enable_gqa": gqa}
    return context.emit(aten.scaled_dot_product_attention.default, arguments, options, node.meta["val"], layouts)


def _local_attention(
    context: Context, node: fx.Node, query: Value, key: Value, value: Value, mask: Value | None
) -> Result:
    """Every query of this rank against keys that every rank has."""
    layout = query.layouts[-2]
    causal, _, _ = _options(context, node)
    if causal and layout is not None:
        raise MixesTokens("masks a rank's own queries by their place in the sequence")
    layouts = (None,) * (len(context.sizes(node)) - 2) + (layout, None)
    if mask is not None:
        mask = context.aligned(context.gathered(mask, len(mask.sizes) - 1), (*layouts[:-1], None))
    return _call(context, node, query, key, value, mask, layouts)


def _attention_of_each(
    context: Context, node: fx.Node, query: Value, key: Value, value: Value, mask: Value | None
) -> Result:
    """One attention per token, say over the frames of a place or over the features: the tokens are its batch."""
    if any(x.layouts[-2] is not None for x in (query, key, value)):
        raise MixesTokens("has tokens both in the batch and in the sequence of an attention")
    rank = len(context.sizes(node))
    operands = [query, key, value] if mask is None else [query, key, value, mask]
    layouts = context.align(operands, rank, context.sizes(node))
    if layouts[-1] is not None or layouts[-2] is not None:
        raise MixesTokens("masks by token an attention whose batch they are")
    query, key, value, *masks = (context.aligned(x, layouts) for x in operands)
    return _call(context, node, query, key, value, masks[0] if masks else None, layouts)


def _distributed_attention(
    context: Context, node: fx.Node, query: Value, key: Value, value: Value, mask: Value | None
) -> Result:
    query, key, value = (_as_one_sequence(context, x) for x in (query, key, value))
    layout = key.layouts[-2] or value.layouts[-2]
    assert layout is not None
    key, value = (x if x.layouts[-2] else context.sharded(x, len(x.sizes) - 2, layout) for x in (key, value))
    queries = query.layouts[-2]
    if queries is None and same(query.sizes[-2], layout.size) and context.has_tokens(query.sizes[-2]):
        query, queries = context.sharded(query, len(query.sizes) - 2, layout), layout
    of_query = queries or Layout((Part(query.sizes[-2], sharded=False),))
    if len(query.sizes) not in (3, 4) or of_query.merged or layout.merged or not _one_layout(key, value):
        raise MixesTokens("attends over tokens in a form that distributed attention does not take")
    if any(x.sizes[:-2] != query.sizes[:-2] and not _grouped(context, node, x, query) for x in (key, value)):
        raise MixesTokens("broadcasts keys over queries in an attention over tokens")
    if queries is not None and context.shard_of(queries) is not context.shard_of(layout):
        raise MixesTokens("joins tensors whose tokens lie differently over the ranks")
    whole_mask = None if mask is None else context.whole(mask).node
    causal, scale, gqa = _options(context, node)
    arguments = (
        *(query.node, key.node, value.node, whole_mask, context.shard_of(layout)),
        *(context.parts(of_query), context.parts(layout), causal, scale, gqa),
    )
    layouts = (None,) * (len(query.sizes) - 2) + (queries, None)
    result = context.emit(runtime.attention_over_tokens, arguments, {}, node.meta["val"], layouts)
    moved = sum((x.bytes for x in (query, key, value, result)), sympy.S.Zero)
    context.record("attention", "self-attention over the tokens", moved)
    return result


def _as_one_sequence(context: Context, x: Value) -> Value:
    """Tokens that were merged from several dimensions (frames, rows, columns), in consecutive ranges."""
    layout, dim = x.layouts[-2], len(x.sizes) - 2
    if layout is None or not (layout.alone and layout.merged):
        return x
    after = Layout((Part(layout.size, sharded=True),))
    return context.redistributed(x, dim, after, "attends over tokens of several dimensions")


def _one_layout(key: Value, value: Value) -> bool:
    a, b = key.layouts[-2], value.layouts[-2]
    return a is not None and b is not None and alike(a, b)


def _grouped(context: Context, node: fx.Node, x: Value, query: Value) -> bool:
    gqa = _options(context, node)[2]
    return gqa and len(x.sizes) == 4 and same(x.sizes[0], query.sizes[0])


def matmul(context: Context, node: fx.Node) -> Result:
    """``a @ b`` of at least two dimensions each, batched and broadcast.

    Rows stay where they are. A contraction over tokens, and columns where the rows are tokens already, need all of
    one operand: it is gathered, which is what attention written out as two products comes to.
    """
    a, b = (context.value(arg) for arg in node.args[:2])
    if min(len(a.sizes), len(b.sizes)) < 2:
        return _with_vector(context, node, a, b)
    a, b = _without_contraction(context, a, b)
    if a.layouts[-2] is not None and b.layouts[-1] is not None:
        b = _noted(context, b, len(b.sizes) - 1)
    sizes = context.sizes(node)
    batch = context.align([_batch(a), _batch(b)], len(sizes) - 2, sizes[:-2])
    if any(batch) and (a.layouts[-2] or b.layouts[-1]):
        raise MixesTokens("has tokens both in the batch and in the sequence of a product")
    layouts = (*batch, a.layouts[-2], b.layouts[-1])
    a, b = (context.aligned(x, (*batch, x.layouts[-2], x.layouts[-1])) for x in (a, b))
    return context.emit(node.target, (a.node, b.node), {}, node.meta["val"], layouts)


def _without_contraction(context: Context, a: Value, b: Value) -> tuple[Value, Value]:
    if a.layouts[-1] is None and b.layouts[-2] is None:
        return a, b
    return _noted(context, a, len(a.sizes) - 1), _noted(context, b, len(b.sizes) - 2)


def _noted(context: Context, value: Value, dim: int) -> Value:
    if value.layouts[dim] is None:
        return value
    context.record("gathered", "multiplies tokens with tokens", value.bytes)
    return context.gathered(value, dim)


def _batch(value: Value) -> Value:
    return Value(value.node, value.sizes[:-2], value.layouts[:-2], value.itemsize)


def _with_vector(context: Context, node: fx.Node, a: Value, b: Value) -> Result:
    if len(b.sizes) == 1 and a.layouts[-1] is None and not b.sharded:
        return context.emit(node.target, (a.node, b.node), {}, node.meta["val"], a.layouts[:-1])
    raise MixesTokens("multiplies tokens with a vector of tokens")


def einsum(context: Context, node: fx.Node) -> Result:
    """A sum of products by letters. One letter of the result may be tokens; tokens of any other are gathered."""
    equation = str(node.args[0]).replace(" ", "")
    values = [context.value(operand) for operand in node.args[1]]  # type: ignore[union-attr]
    sources, _, result = equation.partition("->")
    terms = sources.split(",")
    if not result or "." in equation or any(len(set(term)) < len(term) for term in terms):
        raise MixesTokens("is written in a form that is not followed")
    kept: dict[str, Layout] = {}
    for term, value in zip(terms, values, strict=True):
        for letter, layout in zip(term, value.layouts, strict=True):
            if layout is None or letter not in result or (kept and letter not in kept):
                continue
            if not alike(kept.setdefault(letter, layout), layout):
                raise MixesTokens("joins tensors whose tokens lie differently over the ranks")
    values = [_einsum_operand(context, term, value, kept) for term, value in zip(terms, values, strict=True)]
    layouts = tuple(kept.get(letter) for letter in result)
    return context.emit(node.target, (equation, [value.node for value in values]), {}, node.meta["val"], layouts)


def _einsum_operand(context: Context, term: str, value: Value, kept: dict[str, Layout]) -> Value:
    for dim, letter in enumerate(term):
        if letter not in kept:
            value = _noted(context, value, dim)
    return context.aligned(value, [kept.get(letter) for letter in term])


def added_product(context: Context, node: fx.Node) -> Result:
    """addmm, baddbmm: ``beta * input + alpha * a @ b``."""
    added, a, b = (context.value(arg) for arg in node.args[:3])
    if a.layouts[-1] is not None or b.sharded or (len(a.sizes) == 3 and any(a.layouts[:1])):
        raise MixesTokens("multiplies tokens with tokens")
    layouts = (*a.layouts[:-1], None)
    added = context.aligned(added, layouts)
    if any(added.layouts) and context.align([added], len(layouts), added.sizes) != layouts:
        raise MixesTokens("adds tokens that lie differently over the ranks")
    arguments = (added.node, a.node, b.node)
    return context.emit(node.target, arguments, context.mapped(node.kwargs), node.meta["val"], layouts)


def linear(context: Context, node: fx.Node) -> Result:
    value = context.value(node.args[0])
    parameters = [context.value(arg) for arg in node.args[1:] if arg is not None]
    if value.layouts[-1] is not None or any(parameter.sharded for parameter in parameters):
        raise MixesTokens("multiplies along the tokens")
    return context.again(node, (*value.layouts[:-1], None))


def lookup(context: Context, node: fx.Node) -> Result:
    """embedding: a row of the table per index."""
    table, index = context.value(node.args[0]), context.value(node.args[1])
    if table.sharded:
        raise MixesTokens("looks up tokens by their place")
    return context.again(node, (*index.layouts, None))


Rule = Callable[[Context, fx.Node], Result]


def pointwise(context: Context, node: fx.Node) -> Result:
    """Each element of the result from the same element of the operands, after broadcasting."""
    like = node.meta["val"]
    layouts = context.align(context.inputs(node), like.ndim, context.sizes_of(like))
    replaced: dict[fx.Node, fx.Node] = {}

    def note(operand: fx.Node) -> fx.Node:
        value = context.environment.get(operand)
        if isinstance(value, Value):
            replaced[operand] = context.aligned(value, layouts).node
        return operand

    fx.node.map_arg((node.args, node.kwargs), note)
    args, kwargs = context.mapped(node.args, replaced), context.mapped(node.kwargs, replaced)
    return context.emit(node.target, args, kwargs, like, layouts)


def as_other(context: Context, node: fx.Node) -> Result:
    """type_as: only the dtype of the second operand counts."""
    return context.again(node, context.value(node.args[0]).layouts)


def dropout(context: Context, node: fx.Node) -> Result:
    """Outside training, the identity; in training it is refused before any rule is asked."""
    return context.value(node.args[0])


def norm(context: Context, node: fx.Node) -> Result:
    """layer_norm, rms_norm: over the last dimensions."""
    value = context.value(node.args[0])
    shape = list(node.args[1])  # type: ignore[arg-type]
    if any(value.layouts[len(value.sizes) - len(shape) :]):
        raise MixesTokens("normalises over the tokens")
    return context.again(node, value.layouts)


def reduction(context: Context, node: fx.Node) -> Result:
    """Sums, means, maxima over dimensions that are not the tokens."""
    value = context.value(node.args[0])
    dims = context.argument(node, "dim")
    keep = bool(context.argument(node, "keepdim", False))
    rank = len(value.sizes)
    over = (
        range(rank) if dims is None or dims == [] else [d % rank for d in ([dims] if isinstance(dims, int) else dims)]
    )
    if any(value.layouts[dim] is not None for dim in over):
        raise MixesTokens("reduces over the tokens")
    layouts = [layout for dim, layout in enumerate(value.layouts) if keep or dim not in over]
    return _results(context, node, layouts)


def along_dimension(context: Context, node: fx.Node) -> Result:
    """softmax, cumsum, sort, glu, repeat_interleave: positions of one dimension meet, which must not be the tokens."""
    value = context.value(node.args[0])
    dim = context.argument(node, "dim", -1)
    if dim is None or value.layouts[dim] is not None:
        raise MixesTokens("combines the tokens")
    return _results(context, node, value.layouts)


def _results(context: Context, node: fx.Node, layouts: Any) -> Result:
    """One tensor, or several (values and indices), of the same layouts."""
    if isinstance(node.meta["val"], torch.Tensor):
        return context.again(node, layouts)
    results = context.copy(node)
    return [
        Value(item.node, item.sizes, tuple(layouts), item.itemsize) if isinstance(item, Value) else item
        for item in results  # type: ignore[union-attr]
    ]


def _table() -> dict[Any, Rule]:
    groups: dict[Rule, str] = {
        pointwise: "to _to_copy clone contiguous copy expand_as alias detach lift_fresh_copy empty_like zeros_like "
        "ones_like full_like polar real imag conj _conj arctan2 hardswish log_sigmoid threshold hardtanh "
        "logaddexp nan_to_num square lerp softplus elu celu selu relu6 mish",
        as_other: "type_as",
        dropout: "dropout feature_dropout alpha_dropout",
        norm: "layer_norm rms_norm",
        reduction: "sum mean amax amin max min var std prod any all logsumexp linalg_vector_norm argmax argmin norm "
        "var_mean median kthvalue aminmax count_nonzero",
        along_dimension: "softmax _softmax log_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp "
        "diff sort argsort topk glu repeat_interleave",
        # only dtype and device of the operand count; sizes are those over all ranks
        Context.copy: "new_zeros new_ones new_empty new_full",
        attention: "scaled_dot_product_attention",
        matmul: "matmul bmm mm",
        einsum: "einsum",
        added_product: "addmm baddbmm",
        linear: "linear",
        lookup: "embedding",
        shapes.reshape: "view reshape _unsafe_view flatten unflatten",
        shapes.permute: "permute transpose t numpy_T mT",
        shapes.unsqueeze: "unsqueeze",
        shapes.squeeze: "squeeze",
        shapes.expand: "expand",
        shapes.repeat: "repeat",
        shapes.cat: "cat concat concatenate",
        shapes.stack: "stack",
        shapes.slice_: "slice",
        shapes.split: "split split_with_sizes chunk",
        shapes.unbind: "unbind",
        shapes.select: "select",
        shapes.slice_scatter: "slice_scatter",
        shapes.pad: "constant_pad_nd pad",
        shapes.moved_within: "flip roll",
        shapes.last_dimension: "view_as_complex view_as_real",
    }
    return {getattr(aten, name): rule for rule, names in groups.items() for name in names.split()}


RULES: Mapping[Any, Rule] = MappingProxyType(_table())


def rule_for(node: fx.Node) -> Rule | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in RULES:
        return RULES[target]
    if torch.Tag.pointwise in target.tags and isinstance(node.meta.get("val"), torch.Tensor):
        return pointwise
    return RULES.get(target.overloadpacket)
