"""FLOPs and attention of what runs, counted while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

from arachnec.tracing.memory import Flash


@dataclass
class CountedAttention(TorchFunctionMode):
    """Counts attention by its formula; a ``stub`` of it computes nothing, and keeps what a fused one keeps."""

    stub: bool
    flops: int = 0
    seen: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        given: Mapping[str, Any] = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
        q, k, v = given["query"], given["key"], given["value"]
        output: Tensor
        if self.stub:
            with torch._C.DisableTorchFunction():
                output = Flash.apply(q, k, v, given.get("attn_mask"))  # type: ignore[no-untyped-call]
        else:
            with _disable_current_modes():  # counted here, whatever kernel it is
                output = func(*args, **kwargs)
        self.flops += 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        size = sum(x.numel() * x.element_size() for x in (q, k, v, output))
        if q.shape[-2] == k.shape[-2]:  # as long as its queries: no attention over the caption
            self.seen.append((int(q.shape[-3]) if q.ndim > 3 else 1, size))
        return output


@dataclass(frozen=True)
class _OneModule:
    """In place of torch's tracker of modules: all that runs is in none in particular."""

    parents: frozenset[str] = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class TotalFlops(FlopCounterMode):
    """Counts inside; ``get_total_flops`` says how many."""

    def __init__(self) -> None:
        super().__init__(display=False)
        tracker: Any = _OneModule()
        self.mod_tracker = tracker
