"""A model built without ever being whole in memory: each parameter is handed over once its constructor is done with it.

The constructor runs twice. On the meta device, where nothing takes memory, it is watched: in which order it comes to
its parameters, and when it comes to each for the last time. Then it runs on the CPU, with the values that a plain build
has, drawn in the same order. A parameter that it does not come to again is handed over, and its memory given up; one
that it will only overwrite, as an ``apply(init)`` at the end does, gives its memory up until then.

Where every parameter is in a file, none is drawn: what the constructor writes to one is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
OVERWRITES = frozenset({"uniform_", "normal_", "zero_", "fill_", "copy_", "bernoulli_", "random_", "exponential_"})
LIKE = tuple(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn"))  # read the shape alone


class OtherConstruction(BaseException):
    """The constructor did something else than on the meta device; no ``except Exception`` of its own stops this."""


@dataclass(frozen=True)
class _Place:
    """How a tensor lies in a storage, by the storage's number."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Visit:
    """The constructor comes to a storage, and may ``overwrite`` it whole before anything else.

    Or it casts it: ``cast`` is what of it, and ``result`` the number of the storage with the result.
    """

    storage: int
    overwrites: bool = False
    cast: _Place | None = None
    result: int | None = None


@dataclass(frozen=True)
class Construction:
    """How a constructor went on the meta device: its visits in order, and the parameters that they left, by name."""

    visits: tuple[_Visit, ...]
    places: dict[str, _Place]


def watched_build(build: Callable[[], nn.Module]) -> tuple[nn.Module, Construction]:
    """The model of ``build`` on the meta device, and how it came about."""
    watch = _Watch()
    with META, watch.following():
        model = build()
    numbers = ((name, value, watch.number(value)) for name, value in model.named_parameters())
    places = {name: _place(value, number) for name, value, number in numbers if number is not None}
    return model, Construction(tuple(watch.visits), places)


def streamed_build(
    build: Callable[[], nn.Module], construction: Construction, hand_over: Callable[[str, Tensor], None] | None
) -> nn.Module:
    """Run ``build`` on the CPU; ``hand_over`` sees every parameter once, with the values of a plain build. Without it
    parameters get no values, and nothing else may follow from them.

    In the model that is returned the parameters have no memory any more. Raises ``OtherConstruction`` where the
    constructor does something else than it did on the meta device, or reads a parameter that has no values; some
    parameters may have been handed over by then.
    """
    stream = _Stream(construction, hand_over)
    with stream.following():
        model = build()
    stream.end()
    for name, value in model.named_parameters():
        if name not in construction.places:  # put in place of another, behind its module's back
            if hand_over is not None:
                hand_over(name, value.detach())
            _give_up(value.untyped_storage())
    return model


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a constructor. Storages are numbered as they are first registered as a parameter, or cast from one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.visits: list[_Visit] = []
        self._handing_over = False
        self._numbers: dict[int, int] = {}
        self._kept: list[StorageWeakRef] = []  # so that no identity is used again

    @contextmanager
    def following(self) -> Iterator[None]:
        """See what is registered as a parameter, and what is done with it."""

        def registered(module: nn.Module, name: str, value: Tensor | None) -> None:
            if value is not None:
                self.visited(_Visit(self._enrolled(value)))

        handle = register_module_parameter_registration_hook(registered)
        try:
            with _Questions(self), self:
                yield
        finally:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._handing_over or func.is_view or _name(func).startswith("new_") or _name(func) in LIKE:
            return func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and (number := self.number(args[0])) is not None:
            return self._cast(number, func, args, kwargs)
        for value in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            if (number := self.number(value)) is not None:
                visit = _Visit(number, _overwrites(func, args, value))
                self.visited(visit)
                self.reached(visit)
                if self.leaves_out(func, args, value):
                    return value
        return func(*args, **kwargs)

    def leaves_out(self, func: Any, args: Any, value: Tensor) -> bool:
        """Whether nothing is to be done with the values: the operation would write to them alone."""
        return False

    def asked(self, value: Tensor) -> None:
        """Somebody wants to know whether it has values."""
        if (number := self.number(value)) is not None:
            self.visited(_Visit(number, overwrites=True))

    def _cast(self, number: int, func: Any, args: Any, kwargs: Any) -> Tensor:
        visit = _Visit(number, cast=_place(args[0], number), result=len(self._numbers))
        self.visited(visit)
        self.reached(visit)
        result = self.result_of(visit, func, args, kwargs)
        self.visited(_Visit(self._enrolled(result)))
        return result

    def result_of(self, visit: _Visit, func: Any, args: Any, kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        return result

    def number(self, value: Tensor) -> int | None:
        return self._numbers.get(value.untyped_storage()._cdata)

    def _enrolled(self, value: Tensor) -> int:
        storage = value.untyped_storage()
        if storage._cdata not in self._numbers:
            self.enroll(len(self._numbers), storage)
            self._numbers[storage._cdata] = len(self._numbers)
            self._kept.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return self._numbers[storage._cdata]

    def enroll(self, number: int, storage: torch.UntypedStorage) -> None:
        """A storage has a number now."""

    def reached(self, visit: _Visit) -> None:
        """An operation reads or writes the values."""

    def visited(self, visit: _Visit) -> None:
        if visit.cast or not self.visits or self.visits[-1].storage != visit.storage or self.visits[-1].cast:
            self.visits.append(visit)


class _Questions(TorchFunctionMode):
    """Tells the watch whenever a tensor is asked whether it is on the meta device."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_meta:
            self._watch.asked(args[0])
        return func(*args, **(kwargs or {}))


class _Stream(_Watch):  # type: ignore[no-untyped-call]
    """Follows the second run, one visit after the other, and gives up what the first run says is done with."""

    def __init__(self, construction: Construction, hand_over: Callable[[str, Tensor], None] | None) -> None:
        super().__init__()
        self._expected = construction.visits
        self._hand_over = hand_over
        self._at = -1
        self._next = _next_visits(construction.visits)
        self._names: dict[int, list[tuple[str, _Place]]] = {}
        for name, place in construction.places.items():
            self._names.setdefault(place.storage, []).append((name, place))
        self._only_cast = _only_cast(construction)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._given_up: dict[int, int] = {}  # bytes of storages that will be overwritten
        self._cast_before: set[int] = set()  # storages whose cast was handed over

    def enroll(self, number: int, storage: torch.UntypedStorage) -> None:
        if number in self._names or number in self._only_cast:
            self._storages[number] = storage

    def visited(self, visit: _Visit) -> None:
        known = self._expected[self._at] if self._at >= 0 else None
        if known is not None and known.storage == visit.storage and not (visit.cast or known.cast):
            return
        following = self._expected[self._at + 1] if self._at + 1 < len(self._expected) else None
        if following is None or (following.storage, following.cast) != (visit.storage, visit.cast):
            raise OtherConstruction
        self._leave()
        self._at += 1

    def reached(self, visit: _Visit) -> None:
        if visit.storage in self._given_up:
            if not visit.overwrites:
                raise OtherConstruction
            self._storages[visit.storage].resize_(self._given_up.pop(visit.storage))

    def leaves_out(self, func: Any, args: Any, value: Tensor) -> bool:
        if self._hand_over is not None:
            return False
        if args[0] is not value or not _name(func).endswith("_"):
            raise OtherConstruction  # something else would follow from values that are not there
        return True

    def result_of(self, visit: _Visit, func: Any, args: Any, kwargs: Any) -> Tensor:
        if visit.storage not in self._cast_before and self._hand_over is not None:
            return super().result_of(visit, func, args, kwargs)
        dtype = kwargs.get("dtype") or args[0].dtype
        result = torch.empty_strided(args[0].shape, args[0].stride(), dtype=dtype)
        _give_up(result.untyped_storage())
        return result

    def end(self) -> None:
        """The constructor is through."""
        self._leave()
        if self._at + 1 != len(self._expected):
            raise OtherConstruction

    def _leave(self) -> None:
        """The constructor goes on from the storage that it was at."""
        if self._at < 0:
            return
        visit, again = self._expected[self._at], self._next[self._at]
        storage = self._storages.get(visit.storage)
        if storage is None or visit.storage in self._cast_before:
            return
        if again is None:
            for name, place in self._names.pop(visit.storage, ()):
                self._give(name, storage, place, place.dtype)
            _give_up(storage)
        elif again.cast is not None and again.result is not None and visit.storage in self._only_cast:
            for name, place in self._names.pop(again.result, ()):
                self._give(name, storage, again.cast, place.dtype)
            self._cast_before.add(visit.storage)
            _give_up(storage)
        elif again.overwrites and storage.resizable():
            self._given_up[visit.storage] = storage.nbytes()
            storage.resize_(0)

    def _give(self, name: str, storage: torch.UntypedStorage, place: _Place, dtype: torch.dtype) -> None:
        if self._hand_over is None:
            return
        self._handing_over = True  # what is done with it then is nothing that the constructor does
        try:
            value = torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.size, place.stride)
            self._hand_over(name, value.to(dtype))
        finally:
            self._handing_over = False


def _next_visits(visits: Sequence[_Visit]) -> list[_Visit | None]:
    """For every visit the next one of the same storage."""
    later: dict[int, _Visit] = {}
    following: list[_Visit | None] = []
    for visit in reversed(visits):
        following.append(later.get(visit.storage))
        later[visit.storage] = visit
    return following[::-1]


def _only_cast(construction: Construction) -> set[int]:
    """The storages that are cast once, at the end, to a parameter that nothing more is done with."""
    visits = construction.visits
    last = {visit.storage: visit for visit in visits}
    counts = Counter(visit.storage for visit in visits)
    casts = Counter(visit.storage for visit in visits if visit.cast)
    sizes = {place.storage: place.size for place in construction.places.values()}
    return {
        number
        for number, visit in last.items()
        if visit.cast is not None
        and visit.result is not None
        and casts[number] == counts[visit.result] == 1
        and number not in sizes
        and sizes.get(visit.result) == visit.cast.size
    }


def _place(value: Tensor, number: int) -> _Place:
    return _Place(number, tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)


def _give_up(storage: torch.UntypedStorage) -> None:
    if storage.resizable():
        storage.resize_(0)


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name


def _overwrites(func: Any, args: Any, value: Tensor) -> bool:
    """Whether the operation writes all of a tensor's storage and reads none of it."""
    held = value.untyped_storage().nbytes()
    return (
        _name(func) in OVERWRITES
        and args[0] is value
        and held in (0, value.numel() * value.itemsize)  # it has no memory where it was given up
        and all(other is not value for other in args[1:])
    )
