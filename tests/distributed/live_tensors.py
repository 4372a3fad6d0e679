"""How many bytes of tensors are alive at once, for tests of what is never in memory together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """The most bytes that operations on the CPU have made, and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._bytes(ref) for ref in self._storages.values()))
        return result

    def _bytes(self, ref: StorageWeakRef) -> int:
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        return 0 if storage is None else storage.nbytes()
