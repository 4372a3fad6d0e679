"""Loads, chooses and launches generated kernels: a few variants for all shapes, picked by a rule made at compile time.

After DISC (arXiv 2103.05288): no size is a constant of a kernel but the width of a row. A variant says whether rows are
dense (loads are vectorised) and whether a row is held whole in a tile (one pass) or gone over in blocks (two passes).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.backends.generated_index import Unsupported
from arachnec.backends.generated_operations import is_symbolic
from arachnec.backends.generated_source import Source

TILE = 8192  # lanes of a row that a program holds at once
BLOCK = 4096  # lanes of a wider row that it takes at a time
WIDEST = 16384  # lanes of a row whose sums over rows are held
PROGRAMS = 132 * 8


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for, besides the types of its tensors."""

    dense: bool
    outer: int
    inner: int


def variant_of(source: Source, values: Sequence[Any]) -> Variant:
    """The guard: read from strides and addresses at run time, never from the number of rows."""
    dense = all(
        x.stride(-1) == 1 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
        for x in values
        if isinstance(x, Tensor) and x.ndim and x.shape[-1] != 1
    )
    inner = BLOCK if source.wide else _power(source.lanes.inner_size)
    return Variant(dense, _power(source.lanes.outer_size), inner)


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


class Launcher:
    """Runs what one graph computes over rows: ``stores`` and ``sums`` of a graph, in this order."""

    def __init__(
        self,
        module: fx.GraphModule,
        stores: Sequence[fx.Node],
        sums: Sequence[fx.Node],
        write: Callable[..., Source],
        name: str,
    ) -> None:
        source = write(stores, sums, "region")
        lanes = source.lanes.outer_size * source.lanes.inner_size
        if lanes > (WIDEST if sums else TILE):
            source = write(stores, sums, "region", wide=True)
        title = f"{name}_{hashlib.sha256(source.text.encode()).hexdigest()[:12]}"
        self.source = write(stores, sums, title, wide=source.wide)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.positions = tuple(placeholders.index(node) for node in self.source.inputs)
        self.shapes = tuple(_shape(node.meta["val"], self.source) for node in stores)
        self.dtypes = tuple(node.meta["val"].dtype for node in stores)
        self.results = tuple(
            (_shape(c.node.meta["val"], self.source), c.node.meta["val"].dtype) for c in self.source.columns
        )

    @functools.cached_property
    def kernel(self) -> Any:
        return load_kernel(self.source)

    def __call__(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        read = [values[position] for position in self.positions]
        source, like = self.source, read[0]
        sizes = [int(read[number].shape[dim]) for number, dim in source.rows]
        made = [
            _by_rows(shape, sizes, dtype, like.device) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        rows = 1
        for size in sizes:
            rows *= size
        groups = sizes[0] if source.kept else 1
        each = rows // max(groups, 1)
        run = max(1, -(-each // max(1, PROGRAMS // max(groups, 1))))
        programs = groups * -(-each // run)
        width = source.lanes.outer_size * source.lanes.inner_size
        double = any(x.dtype == torch.float64 for x in read)
        total = torch.float64 if double else torch.float32
        partials = torch.zeros(programs, len(source.columns), width, dtype=total, device=like.device)
        variant = variant_of(source, [*read, *made])
        if programs:
            strides = [stride for x in read for stride in x.stride()]
            self.kernel[(programs,)](
                *read, *made, partials, *strides, *sizes, rows, each, run,
                OUTER=source.lanes.outer_size, INNER=source.lanes.inner_size, P=variant.outer, Q=variant.inner,
                DENSE=variant.dense, num_warps=min(16, max(1, variant.outer * variant.inner // 256)),
            )  # fmt: skip
        return (*made, *self._summed(partials, sizes, groups))

    def _summed(self, partials: Tensor, sizes: Sequence[int], groups: int) -> list[Tensor]:
        """The second stage, in a fixed order: partials of each group, or of all."""
        found = []
        for number, column in enumerate(self.source.columns):
            part = partials[:, number]
            if column.kept:
                runs = partials.shape[0] // max(groups, 1)
                total = part.view(groups, runs, -1).sum(1).view(groups, *column.static)
            else:
                total = part.sum(0).view(column.static)
            shape, dtype = self.results[number]
            found.append(_reduced(total, column.node, column.kept).reshape(_sized(shape, sizes)).to(dtype))
        return found


def _reduced(total: Tensor, node: fx.Node, kept: bool) -> Tensor:
    """``total``, of the first row coordinate where ``kept`` and of fixed dimensions, without those summed as well."""
    value = node.all_input_nodes[0].meta["val"]
    dims = {int(d) % value.ndim for d in node.args[1]}  # type: ignore[union-attr, arg-type]
    static = [dim for dim, size in enumerate(value.shape) if not is_symbolic(size)]
    gone = [k + kept for k, dim in enumerate(static) if dim in dims]
    if node.target is torch.ops.aten.mean.dim:
        raise Unsupported("a mean over rows")
    return total.sum(gone) if gone else total


def _shape(value: Tensor, source: Source) -> tuple[int | str, ...]:
    return tuple(str(size) if is_symbolic(size) else int(size) for size in value.shape)


def _by_rows(shape: Sequence[int | str], sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor whose rows lie one behind the other, whatever the order of its dimensions."""
    order = sorted(range(len(shape)), key=lambda dim: not isinstance(shape[dim], str))
    whole = _sized(shape, sizes)
    dense = torch.empty([whole[dim] for dim in order], dtype=dtype, device=device)
    return dense.permute([order.index(dim) for dim in range(len(shape))])


def _sized(shape: Sequence[int | str], sizes: Sequence[int]) -> list[int]:
    """Sizes that clips change come in the order in which rows are counted."""
    lead = iter(sizes)
    return [next(lead) if isinstance(size, str) else size for size in shape]


@functools.cache
def _loaded(name: str, text: str) -> Any:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arachnec" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.py"
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".py", delete=False, encoding="utf-8") as draft:
        draft.write(text)
    Path(draft.name).replace(path)
    spec = importlib.util.spec_from_file_location(f"arachnec_generated_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_kernel(source: Source) -> Any:
    """The kernel of a text, from a file that anyone can read: equal texts are one kernel."""
    return _loaded(source.name, source.text)
