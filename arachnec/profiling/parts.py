"""What the parts of a model take on one rank: a block of each class, and what lies before and behind the blocks.

Moments are taken where a forward enters and leaves each block, and where the gradient of what a block has made is
there. With weight gradients deferred, as a split backward does, the products that were left are timed by part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from arachnec.backends.stage_step import Deferred
from arachnec.cost.profile import FIRST, LAST, PHASES


@dataclass(frozen=True)
class Layers:
    """The blocks of a model by path, in the order in which they run, and the name of each one's class."""

    classes: tuple[tuple[str, str], ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return (*dict.fromkeys(name for _, name in self.classes), FIRST, LAST)

    @property
    def phases(self) -> tuple[str, ...]:
        """What ``timed_parts`` gives, in its order."""
        return tuple(f"{part}:{phase}" for part in self.parts for phase in PHASES)


@dataclass
class _Moments:
    """Of one forward and backward."""

    now: Callable[[], float]
    entered: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    given: float | None = None  # the gradient of what the first block read is there
    gradients: dict[int, float] = field(default_factory=dict)  # of what a block made, by number

    @contextmanager
    def watching(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        handles = []
        for number, block in enumerate(blocks):
            handles.append(block.register_forward_pre_hook(self._enter(number), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave(number)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.entered.append(self.now())
            if number == 0 and (read := _differentiable((args, kwargs))) is not None:
                read.register_hook(self._given)  # type: ignore[no-untyped-call]

        return hook

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.left.append(self.now())
            if (traced := _differentiable(output)) is not None:
                traced.register_hook(lambda gradient: self._arrived(number))  # type: ignore[no-untyped-call]

        return hook

    def _given(self, gradient: Tensor) -> None:
        self.given = self.now()

    def _arrived(self, number: int) -> None:
        self.gradients[number] = self.now()


def timed_parts(
    model: nn.Module,
    layers: Layers,
    loss: Callable[[], Tensor],
    now: Callable[[], float],
) -> tuple[float, ...]:
    """ms of every part in every phase (``Layers.phases``), of a block the mean over its class. ``now`` in seconds.

    ``loss`` runs the model's forward on one micro-batch; its backward runs twice, once with weight gradients deferred.
    What the forward then takes more is counted with the activation gradients. The first run should not be the first of
    its size: memory that is new to the process takes longer.
    """
    whole = _run(model, layers, loss, now, None)
    deferred = Deferred()
    split = _run(model, layers, loss, now, deferred)
    weights = _weights(model, layers, deferred, now)
    times: list[float] = []
    for part in layers.parts:
        count = sum(name == part for _, name in layers.classes) or 1
        forward, backward = whole[part]
        activation = max(0.0, split[part][1] + split[part][0] - forward)
        seconds = (forward, backward, activation, weights.get(part, 0.0))
        times += [1e3 * value / count for value in seconds]
    return tuple(times)


def _run(
    model: nn.Module, layers: Layers, loss: Callable[[], Tensor], now: Callable[[], float], deferred: Deferred | None
) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward by part, over all its blocks."""
    moments = _Moments(now)
    blocks = [model.get_submodule(path) for path, _ in layers.classes]
    with moments.watching(blocks):
        started = now()
        if deferred is None:
            objective = loss()
        else:
            with deferred:
                objective = loss()
        middle = now()
        objective.backward()  # type: ignore[no-untyped-call]
        ended = now()
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    forward[FIRST], forward[LAST] = moments.entered[0] - started, middle - moments.left[-1]
    last = len(blocks) - 1
    backward[LAST] = moments.gradients.get(last, ended) - middle
    until = moments.given if moments.given is not None else ended
    backward[FIRST] = ended - until
    for number, (_, name) in enumerate(layers.classes):
        forward[name] += moments.left[number] - moments.entered[number]
        before = until if number == 0 else moments.gradients.get(number - 1, ended)
        backward[name] += before - moments.gradients.get(number, before)
    return {part: (forward[part], backward[part]) for part in layers.parts}


def _weights(model: nn.Module, layers: Layers, deferred: Deferred, now: Callable[[], float]) -> Mapping[str, float]:
    """Seconds of the deferred products by part, which are gone afterwards; a backward comes to those behind the blocks
    first."""
    owners = {id(p): name for path, name in layers.classes for p in model.get_submodule(path).parameters()}
    by_part: dict[str, Deferred] = defaultdict(Deferred)
    outside = LAST
    products, deferred.products[:] = [*deferred.products], []  # the graph holds that list, which holds the graph
    for product in products:
        owner = owners.get(id(product.weight))
        outside = outside if owner is None else FIRST
        by_part[owner or outside].products.append(product)
    seconds = {}
    del products
    for part, own in by_part.items():
        started = now()
        own.run()
        seconds[part] = now() - started
    return seconds


def _differentiable(value: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
