"""What a captured graph computes: floating-point operations and attention, exactly, as expressions in B, S and T."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import sympy
import torch
from torch import Tensor, fx

from arachnec.tracing.captured import CapturedBlock, Dims
from arachnec.tracing.dims import S, T

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.bmm.default, aten.matmul.default)
ADD_MATMULS = (aten.addmm.default, aten.baddbmm.default)
CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
)  # fmt: skip
SDPA = aten.scaled_dot_product_attention.default
SOFTMAXES = (aten.softmax.int, aten._softmax.default)


@dataclass(frozen=True)
class AttentionCost:
    """One attention in which every token meets every token: bytes of query, key, value and output, and its heads."""

    traffic: sympy.Expr
    heads: sympy.Expr
    joint: bool  # text tokens stand beside the video's in it


def block_flops(captured: CapturedBlock) -> sympy.Expr:
    """Multiplications and additions of one forward; an attention is 4*B*H*Lq*Lk*D, whatever its mask skips."""
    return sympy.expand(sum((_flops(captured, node) for node in _calls(captured)), sympy.Integer(0)))


def _calls(captured: CapturedBlock) -> Iterator[fx.Node]:
    return (node for node in captured.exported.graph.nodes if node.op == "call_function")


def _flops(captured: CapturedBlock, node: fx.Node) -> sympy.Expr:
    out = captured.dims(node)
    tensors = [arg for arg in node.args if isinstance(arg, fx.Node)]
    if node.target is SDPA:
        q, k, v = (captured.dims(arg) for arg in tensors[:3])
        return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    if node.target is aten.linear.default:
        return 2 * prod(out) * captured.dims(tensors[0])[-1]
    if node.target in MATMULS:
        return 2 * prod(out) * captured.dims(tensors[0])[-1]
    if node.target in ADD_MATMULS:
        return 2 * prod(out) * captured.dims(tensors[1])[-1]
    if node.target in CONVOLUTIONS:
        return 2 * prod(out) * prod(captured.dims(tensors[1])[1:])
    if node.target is aten.einsum.default:
        return _einsum(captured, node)
    return sympy.Integer(0)


def _einsum(captured: CapturedBlock, node: fx.Node) -> sympy.Expr:
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str) and isinstance(operands, Sequence)
    sizes: dict[str, sympy.Expr] = {}
    for letters, operand in zip(equation.split("->")[0].replace(" ", "").split(","), operands, strict=True):
        if isinstance(operand, fx.Node) and "." not in letters:
            sizes |= dict(zip(letters, captured.dims(operand), strict=True))
    return 2 * prod(sizes.values()) if sizes else sympy.Integer(0)


def token_attentions(captured: CapturedBlock) -> tuple[AttentionCost, ...]:
    """The attentions whose query and key lengths both grow with S, fused or written out with a softmax."""
    attentions = []
    for node in _calls(captured):
        if node.target is SDPA:
            q, k, v = (arg for arg in node.args[:3] if isinstance(arg, fx.Node))
            lengths = captured.dims(q)[-2], captured.dims(k)[-2]
            if all(S in length.free_symbols for length in lengths):
                attentions.append(_attention(captured, (q, k, v, node), captured.dims(q)))
        elif node.target in SOFTMAXES and _is_square(captured.dims(node)):
            around = [*_nearest(node, lambda n: n.all_input_nodes), *_nearest(node, lambda n: n.users)]
            tensors = [x for m in around for x in (*m.all_input_nodes[:2], m) if not _is_square(captured.dims(x))]
            attentions.append(_attention(captured, tensors, captured.dims(node)))
    return tuple(attentions)


def _attention(captured: CapturedBlock, tensors: Sequence[fx.Node], scores: Dims) -> AttentionCost:
    heads = scores[-3] if len(scores) > 3 else sympy.Integer(1)
    traffic = sum((prod(captured.dims(x)) * x.meta["val"].dtype.itemsize for x in tensors), sympy.Integer(0))
    joint = any(T in size.free_symbols for x in tensors for size in captured.dims(x)[1:])
    return AttentionCost(sympy.expand(traffic), heads, joint)


def _is_square(dims: Dims) -> bool:
    return len(dims) > 1 and S in dims[-1].free_symbols and S in dims[-2].free_symbols


def _nearest(node: fx.Node, step: object) -> list[fx.Node]:
    """The first matrix products found walking from ``node``."""
    assert callable(step)
    seen, front, nearest = {node}, [node], []
    while front:
        following: Iterable[fx.Node] = step(front.pop())
        for other in following:
            if other in seen:
                continue
            seen.add(other)
            if other.target in MATMULS or other.target in ADD_MATMULS or other.target is aten.einsum.default:
                nearest.append(other)
            elif isinstance(other.meta.get("val"), Tensor) and other.op == "call_function":
                front.append(other)
    return nearest[:1]
