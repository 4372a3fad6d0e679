"""The table of rules: which ops commute with sharding the tokens, and under what condition.

A rule takes a traced call with at least one sharded operand and adds its counterpart on one rank. It raises MixesTokens
where it cannot prove that this is right; then the operands are gathered. An op that is not in ``RULES`` is pointwise
where torch says so (``torch.Tag.pointwise``), else unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from arachnec.spmd import attention_rules as attention
from arachnec.spmd import shape_rules as shapes
from arachnec.spmd.context import Context, MixesTokens, Result
from arachnec.spmd.layouts import Value

aten = torch.ops.aten
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
    value = context.value(node.args[0])
    return context.emit(node.target, context.mapped(node.args), {}, node.meta["val"], value.layouts)


def dropout(context: Context, node: fx.Node) -> Result:
    """Outside training, the identity; in training it is refused before any rule is asked."""
    return context.value(node.args[0])


def norm(context: Context, node: fx.Node) -> Result:
    """layer_norm, rms_norm: over the last dimensions."""
    value = context.value(node.args[0])
    shape = list(node.args[1])  # type: ignore[arg-type]
    if any(value.layouts[len(value.sizes) - len(shape) :]):
        raise MixesTokens("normalises over the tokens")
    layouts = value.layouts
    args, kwargs = context.mapped(node.args), context.mapped(node.kwargs)
    return context.emit(node.target, args, kwargs, node.meta["val"], layouts)


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


def factory(context: Context, node: fx.Node) -> Result:
    """new_zeros and the like: only dtype and device of the operand count; sizes are those over all ranks."""
    return context.copy(node)


def _results(context: Context, node: fx.Node, layouts: Any) -> Result:
    """One tensor, or several (values and indices), of the same layouts."""
    args, kwargs = context.mapped(node.args), context.mapped(node.kwargs)
    if isinstance(node.meta["val"], torch.Tensor):
        return context.emit(node.target, args, kwargs, node.meta["val"], layouts)
    results = context.unsharded(node.meta["val"], context.call(node.target, *args, **kwargs))
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
        factory: "new_zeros new_ones new_empty new_full",
        attention.attention: "scaled_dot_product_attention",
        attention.matmul: "matmul bmm mm",
        attention.einsum: "einsum",
        attention.added_product: "addmm baddbmm",
        attention.linear: "linear",
        attention.lookup: "embedding",
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


def rule_for(node: fx.Node, rules: Mapping[Any, Rule] = RULES) -> Rule | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in rules:
        return rules[target]
    if torch.Tag.pointwise in target.tags and isinstance(node.meta.get("val"), torch.Tensor):
        return pointwise
    return rules.get(target.overloadpacket)
