"""Pattern matching: the parts of a region that hand-written kernels compute, whatever model they come from.

A pattern is walked from its last operation to its inputs; operands of sums and products are tried in both orders.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from arachnec.fusion.graph import FusionGraph, Kind, bits, stem
from arachnec.fusion.match_norm import Norm, find_norm
from arachnec.fusion.match_rope import complex_rope, joined_rope, norm_alone, norm_rope, wide_rope
from arachnec.fusion.walk import Match, Walk, same_dtype

WIDEST = 8192  # values of a row that the hand-written norms take


def match_region(graph: FusionGraph, region: int) -> tuple[Match, ...]:
    """Kernels for parts of ``region``, the largest first found from its end; no operation is in two."""
    matches: list[Match] = []
    free = region
    for i in reversed(list(bits(region & graph.core))):
        if not free >> i & 1:
            continue
        for pattern in _PATTERNS:
            match = pattern(Walk(graph, free), graph.ops[i].name)
            if match is not None and _is_closed(graph, match, region) and _fits(graph, match):
                matches.append(match)
                free &= ~match.ops
                break
    return tuple(reversed(matches))


def kernel_name(graph: FusionGraph, region: int, matches: tuple[Match, ...]) -> str:
    """The kernels of the region: ``"norm_modulate"``, ``"2 norm_rope + generated"``; joins are not named."""
    rest = region & graph.core
    for match in matches:
        rest &= ~match.ops
    counts = Counter(match.kernel for match in matches)
    names = [name if n == 1 else f"{n} {name}" for name, n in counts.items()]
    if not matches or any(graph.kinds[i] is not Kind.JOIN for i in bits(rest)):
        names.append("generated")
    return " + ".join(names)


def _is_closed(graph: FusionGraph, match: Match, region: int) -> bool:
    """Whether nothing but the results is read by others, so that the rest need not exist."""
    results = {graph.index[name] for name in match.results.values()}
    return not any(i not in results and graph.escapes(i, match.ops) for i in bits(match.ops & graph.core))


def _fits(graph: FusionGraph, match: Match) -> bool:
    """Whether the kernel holds rows this wide: a norm keeps all of its row in registers."""
    if not match.kernel.endswith(("norm_modulate", "norm_rope")):
        return True
    heads, size = match.options.get("heads"), match.options.get("size")
    if isinstance(heads, int) and isinstance(size, int):
        return heads * size <= WIDEST
    width = graph.sizes.shapes[match.results["y"]][-1]
    return bool(width.is_Integer and width <= WIDEST)


def _modulated(walk: Walk, name: str) -> tuple[Norm, dict[str, str]] | None:
    """``norm * (1 + scale) + shift``, one of them or none."""
    inner, casts = walk.uncast(name)
    for addend, left, right, ops in walk.multiply_add(inner):
        norm, scale = find_norm(walk, left), walk.one_plus(right)
        moved, moves = walk.vector(addend)
        if norm is not None and scale is not None and walk.one_kind(walk.dims(name), scale[0], moved):
            ops |= norm.ops | scale[1] | moves | casts
            return replace(norm, ops=ops), {"scale": scale[0], "shift": moved}
    times = walk.op(inner, "mul")
    for left, right in walk.pairs(times[0]) if times else ():
        norm, scale = find_norm(walk, left), walk.one_plus(right)
        if times and norm is not None and scale is not None and walk.one_kind(walk.dims(name), scale[0]):
            return replace(norm, ops=norm.ops | scale[1] | times[1] | casts), {"scale": scale[0]}
    if (norm := find_norm(walk, name)) is not None:
        return norm, {}
    total = walk.op(inner, "add")
    for left, right in walk.pairs(total[0]) if total else ():
        norm, (moved, moves) = find_norm(walk, left), walk.vector(right)
        if total and norm is not None and walk.one_kind(walk.dims(name), moved):
            return replace(norm, ops=norm.ops | moves | total[1] | casts), {"shift": moved}
    return None


def _norm_modulate(walk: Walk, name: str) -> Match | None:
    modulated = _modulated(walk, name)
    if modulated is None or not modulated[1]:
        return None
    norm, vectors = modulated
    x, ops = same_dtype(walk, norm.x, name)
    if x is None:
        return None
    return Match("norm_modulate", {"y": name}, {"x": x, **norm.operands, **vectors}, norm.options, norm.ops | ops)


def _gate_residual_norm_modulate(walk: Walk, name: str) -> Match | None:
    modulated = _modulated(walk, name)
    if modulated is None:
        return None
    norm, vectors = modulated
    h, casts = same_dtype(walk, norm.x, name)
    if h is None:
        return None
    inner, more = walk.uncast(h)
    casts |= more | norm.ops
    if (gated := _gated_sum(walk, inner, h, *vectors.values())) is None:
        total, dims = walk.op(inner, "add"), walk.dims(h)
        for residual, side in walk.pairs(total[0]) if total else ():
            stream, more = same_dtype(walk, residual, h)
            if total and stream is not None and walk.dims(residual) == walk.dims(side) == dims:
                side, idle = walk.uncast(side)
                gated = {"branch": side, "residual": stream}, total[1] | more | idle
                break
    if gated is None:
        return None
    operands, ops = gated
    operands |= {**norm.operands, **vectors}
    return Match("gate_residual_norm_modulate", {"h": h, "y": name}, operands, norm.options, casts | ops)


def _gate_residual(walk: Walk, name: str) -> Match | None:
    """``residual + gate * branch`` with no norm behind it."""
    inner, casts = walk.uncast(name)
    gated = _gated_sum(walk, inner, name)
    return None if gated is None else Match("gate_residual", {"h": name}, gated[0], {}, casts | gated[1])


def _gated_sum(walk: Walk, name: str, like: str, *vectors: str) -> tuple[dict[str, str], int] | None:
    """Branch, residual and gate of ``residual + gate * branch``, whose gate is of one kind with ``vectors``."""
    dims = walk.dims(like)
    for residual, branch, gate, ops in walk.multiply_add(name):
        stream, more = same_dtype(walk, residual, like)
        if stream is None or walk.dims(residual) != dims or walk.dims(branch) != dims:
            continue
        vector, moves = walk.vector(gate)
        if walk.one_kind(dims, vector, *vectors):
            branch, casts = walk.uncast(branch)
            return {"branch": branch, "residual": stream, "gate": vector}, ops | more | moves | casts
    return None


def _bias_gelu(walk: Walk, name: str) -> Match | None:
    matched = walk.op(name, "gelu")
    if matched is not None and (match := _biased_linear(walk, name)) is not None:
        return match
    total = walk.op(matched[0].operands[0], "add") if matched else None
    for x, bias in walk.pairs(total[0]) if total else ():
        if matched and total and len(walk.dims(bias)) == 1 and walk.dims(x)[-1:] == walk.dims(bias):
            options = {"approximate": matched[0].attrs.get("approximate", "none")}
            return Match("bias_gelu", {"y": name}, {"x": x, "bias": bias}, options, matched[1] | total[1])
    return None


def _biased_linear(walk: Walk, name: str) -> Match | None:
    """GELU alone, of a linear layer's result that nobody else reads: the kernel adds the bias in the layer's place.

    Forward this moves as many bytes. In the backward the bias's gradient comes with that of the activation, where the
    layer would read the whole gradient once more. Beside other operations of a region it would cost their fusion.
    """
    graph = walk.graph
    if walk.free & graph.core != 1 << graph.index[name]:
        return None
    gelu = graph.ops[graph.index[name]]
    linear = graph.index.get(gelu.operands[0])
    if linear is None or stem(graph.ops[linear]) != "linear" or len(graph.ops[linear].operands) != 3:
        return None
    if graph.after[linear] != [graph.index[name]] or graph.results >> linear & 1:
        return None
    options = {"approximate": gelu.attrs.get("approximate", "none")}
    operands = {"x": graph.ops[linear].name, "bias": graph.ops[linear].operands[2]}
    return Match("bias_gelu", {"y": name}, operands, options, 1 << graph.index[name], splits=graph.ops[linear].name)


def biased_gelus(graph: FusionGraph, regions: list[int]) -> list[int]:
    """Single operations outside the regions that a kernel computes with the bias of the layer in front of it."""
    taken = sum(regions)
    alone = [1 << i for i in bits(graph.core & ~taken) if stem(graph.ops[i]) == "gelu"]
    return [region for region in alone if _biased_linear(Walk(graph, region), graph.ops[region.bit_length() - 1].name)]


_PATTERNS = (
    _gate_residual_norm_modulate, _norm_modulate, joined_rope, wide_rope, norm_rope, complex_rope, _gate_residual,
    _bias_gelu, norm_alone,
)  # fmt: skip
