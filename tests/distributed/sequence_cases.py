"""One training step of a model on a shard of its tokens, compared on every rank with the step of one process."""

from __future__ import annotations

import atexit
import copy
import functools
import multiprocessing
import os
import random
import tempfile
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.codegen.fused_block import fuse_as_planned
from arachnec.ir.head_density import HeadPart
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.kernels.attention.subgroups import subgroups
from arachnec.kernels.sparse.cube_sides import group_count
from arachnec.kernels.sparse.token_cubes import Grid
from arachnec.sparsity.head_shares import balanced
from arachnec.spmd.chosen_fetch import Room
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sparse_layers import Layer, SparseCascade, divided
from arachnec.tracing.blocks import CapturedModel, capture_blocks
from tests.distributed.harness import started_by
from tests.spmd.sequence_models import MODELS, Size


@dataclass(frozen=True)
class Step:
    """``tokens`` per rank, sum the clip's; where empty, at random cuts. ``recompute`` is all blocks, or the first so
    many. ``grid`` is the clip's, where attention is sparse; with a ``node`` so many ranks are a machine, and others get
    only the keys that they chose."""

    ranks: tuple[int, ...]
    ulysses: int
    ring: int
    size: Size
    tokens: tuple[int, ...] = ()
    recompute: bool | int = False
    grid: Grid | None = None
    node: int = 0


@dataclass(frozen=True)
class Difference:
    """The loss's relative error, and the worst parameter's: ||g - g0|| / max(||g0||, 1e-3 ||all of g0||)."""

    step: Step
    loss: float
    gradient: float
    parameter: str


def compare(name: str, steps: tuple[Step, ...], timeout: float = 120.0, fused: bool = False) -> list[Difference]:
    """Every step's difference as each of its ranks sees it; with ``fused`` blocks that call the kernels."""
    if not _SERVER:
        _SERVER.append(_Server())
    return _SERVER[0].compare(name, steps, timeout, fused)


class _Server:
    """A process that captures a model once and forks the ranks, which would otherwise each capture it."""

    def __init__(self) -> None:
        with started_by() as context:
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
        theirs.close()

    def compare(self, name: str, steps: tuple[Step, ...], timeout: float, fused: bool) -> list[Difference]:
        self._pipe.send((name, steps, timeout, fused))
        if not self._pipe.poll(timeout + 60):
            raise TimeoutError(f"no answer about {name}")
        answers = self._pipe.recv()
        failures = [answer for answer in answers if isinstance(answer, str)]
        assert not failures, "\n".join(failures)
        return [difference for answer in answers for difference in answer]

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        self._process.kill()


_SERVER: list[_Server] = []


@atexit.register
def _close() -> None:
    for server in _SERVER:
        server.close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            name, steps, timeout, fused = pipe.recv()
        except EOFError:
            return
        try:
            sequence, whole = _captured(name, fused)
        except BaseException:
            pipe.send([traceback.format_exc()])
            continue
        pipe.send(_forked(name, steps, (sequence, whole), timeout))


def _captured(name: str, fused: bool) -> tuple[SequenceModel, nn.Module]:
    """The model that runs on shards, and the model as it was."""
    whole, captured = _model(name)
    how = fuse_as_planned((), kernels=True, compiler=lambda region: region) if fused else None
    return install(copy.deepcopy(whole), captured, how), whole


@functools.cache
def _model(name: str) -> tuple[nn.Module, CapturedModel]:
    torch.manual_seed(0)
    model = MODELS[name].build()
    for parameter in model.parameters():  # gates that start at zero would hide what is wrong behind them
        nn.init.normal_(parameter, std=0.3)
    return model, capture_blocks(model, MODELS[name].examples(), at=MODELS[name].at, verify=False)


def _forked(name: str, steps: tuple[Step, ...], models: tuple[SequenceModel, nn.Module], timeout: float) -> list[Any]:
    context = multiprocessing.get_context("fork")
    sizes = () if any(step.grid for step in steps) else {step.size for step in steps}
    truths = {size: _step(models[1], MODELS[name].arguments(size), 1.0) for size in sizes}  # once, and not on each rank
    models[1].zero_grad(set_to_none=True)
    world = 1 + max(rank for step in steps for rank in step.ranks)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world, folder, name, steps, models[0], truths, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        answers = [_answer(rank, pipe, timeout) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join(5)
            process.kill()
    return answers


def _answer(rank: int, pipe: Connection, timeout: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(timeout) else f"rank {rank} did not answer"
    except EOFError:
        return f"rank {rank} died"


def _rank(
    rank: int,
    world: int,
    folder: str,
    name: str,
    steps: tuple[Step, ...],
    sequence: SequenceModel,
    truths: dict[Size, tuple[float, dict[str, Tensor]]],
    pipe: Connection,
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        groups = ProcessGroups()
        groups.ensure([group for step in steps for group in subgroups(step.ranks, step.ulysses, step.ring)])
        mine = [step for step in steps if rank in step.ranks]
        if any(step.grid for step in steps):
            pipe.send([_compare_sparse(name, sequence, groups, step) for step in mine])
            return
        pipe.send([_compare(name, sequence, truths[step.size], groups, step) for step in mine])
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")
    finally:
        os._exit(0)


def _compare(
    name: str,
    sequence: SequenceModel,
    whole: tuple[float, dict[str, Tensor]],
    groups: ProcessGroups,
    step: Step,
) -> Difference:
    case, degree = MODELS[name], len(step.ranks)
    tokens = step.tokens or uneven(case.tokens(step.size), degree)
    arguments = case.arguments(step.size)
    shard = groups.shard(step.ranks, tokens, step.ulysses, step.ring)
    true_loss, truth = whole
    again: bool | frozenset[str] = step.recompute is True
    if not isinstance(step.recompute, bool):
        paths = list(dict.fromkeys(call.path for call in sequence.captured.calls))
        assert step.recompute < len(paths)
        again = frozenset(paths[: step.recompute])
    with sequence.use(shard, recompute=again):
        loss, partial = _step(sequence.model, arguments, 1 / degree)
    return _difference(step, groups, loss, partial, true_loss, truth)


def _compare_sparse(name: str, sequence: SequenceModel, groups: ProcessGroups, step: Step) -> Difference:
    """Sparse attention on several ranks, heads divided by density, against one process that replays nothing: the ranks
    replay every layer's lists, and would have chosen the same themselves."""
    case, degree = MODELS[name], len(step.ranks)
    arguments, grid = case.arguments(step.size), step.grid
    assert grid is not None
    measured = sequence.sparsify(rank=4)
    layers = {
        at: replace(s, sparse=True, densities=tuple(0.08 + 0.8 * ((head + n) % 3 == 0) for head in range(s.site.heads)))
        for n, (at, s) in enumerate(measured.items())
    }
    sizes = (32, 16, 8)
    count = group_count(grid, *sizes[:2])
    parts = {at: _parts(state.densities, count, degree) for at, state in layers.items()}
    assert any(part.start for shares in parts.values() for part in shares), "some head is cut"
    shard = groups.shard(step.ranks, uneven(case.tokens(step.size), degree), step.ulysses, step.ring)
    learns = None if step.node else 1.0
    room = {at: Room(step.node, (1.0,) * state.site.heads, 2.0) for at, state in layers.items() if step.node}
    alone = SparseCascade(layers, grid, ("0/0/a",), weight=learns, sizes=sizes)
    with sequence.use(None, sparse=alone):
        true_loss, truth = _step(sequence.model, arguments, 1.0)
    chosen = SparseCascade(layers, grid, ("0/0/a",), sizes=sizes, parts=parts, groups=count, room=room)
    with sequence.use(shard, sparse=chosen), torch.no_grad():
        sequence.model(**arguments)
    for layer, lists in chosen.lists.items():
        theirs, site = alone.lists[layer], layers[layer].site
        (cubes,) = (cubes for (_, captions), cubes in chosen._cubes.items() if captions == site.captions)
        own = divided(parts[layer], cubes, degree)[shard.index]
        assert lists is not None and theirs is not None and len(theirs.indices)
        assert torch.equal(lists.indices, theirs.of_shares(own, lists.indices.device).indices)
    replayed = SparseCascade(
        layers, grid, ("0/0/a",), learns, sizes, replay=alone.lists, parts=parts, groups=count, room=room
    )
    with sequence.use(shard, recompute=bool(step.recompute), sparse=replayed):
        loss, partial = _step(sequence.model, arguments, 1 / degree)
    if step.node:
        assert len(replayed.overflowed) == len(chosen.overflowed) == len(layers), "none was recomputed"
        _without_room(sequence, arguments, replace(chosen, room=_no_room(room), lists={}, fetched=set()), shard)
    everywhere = {
        name: partial.get(name, torch.zeros_like(true)) for name, true in truth.items()
    }  # without heads: none
    return _difference(step, groups, loss, everywhere, true_loss, truth)


def _no_room(room: dict[Layer, Room]) -> dict[Layer, Room]:
    return {at: replace(known, margin=0.0) for at, known in room.items()}


def _without_room(
    sequence: SequenceModel, arguments: dict[str, Any], cascade: SparseCascade, shard: SequenceShard
) -> None:
    """Where nothing has room some rank says so, and the objective is no number there."""
    cascade.overflowed.clear()
    with sequence.use(shard, sparse=cascade), torch.no_grad():
        sequence.model(**arguments)
    lacking = torch.stack(cascade.overflowed).any().float()
    assert cascade.of_objective(torch.ones(())).isnan() == bool(lacking)
    dist.all_reduce(lacking, group=shard.group)
    assert lacking > 0


def _parts(densities: tuple[float, ...], count: int, degree: int) -> tuple[HeadPart, ...]:
    division = balanced(densities, count, degree)
    return tuple(HeadPart(s.head, place, s.start, s.stop) for place, own in enumerate(division) for s in own)


def _difference(
    step: Step,
    groups: ProcessGroups,
    loss: float,
    partial: dict[str, Tensor],
    true_loss: float,
    truth: dict[str, Tensor],
) -> Difference:
    degree = len(step.ranks)
    assert partial.keys() == truth.keys()
    for gradient in partial.values() if degree > 1 else ():
        dist.all_reduce(gradient, group=groups.get(step.ranks))
    size = torch.stack([g.norm() for g in truth.values()]).norm()
    worst = max((((partial[n] - g).norm() / torch.maximum(g.norm(), 1e-3 * size)).item(), n) for n, g in truth.items())
    return Difference(step, abs(loss * degree - true_loss) / abs(true_loss), *worst)


def _step(model: nn.Module, arguments: dict[str, Any], weight: float) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    prediction = model(**arguments)
    prediction = prediction[0] if isinstance(prediction, tuple) else prediction
    target = torch.randn(prediction.shape, generator=torch.Generator().manual_seed(1))
    loss = weight * ((prediction - target) ** 2).mean()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def uneven(total: int, degree: int) -> tuple[int, ...]:
    """Shares that are not equal, the same on every rank."""
    cuts = sorted(random.Random(total * degree).sample(range(1, total), degree - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True))
