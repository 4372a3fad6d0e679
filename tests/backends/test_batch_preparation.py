"""Batches of coming forwards: in their order, in a thread or here, and once for all stages of a rank that read one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from arachnec.backends.torch_distributed.batches.batch_preparation import BatchPreparation, HostBatch
from arachnec.ir.nodes import Cascade, Phase
from arachnec.runtime.device_runtime import DeviceRuntime

RUNTIME = DeviceRuntime.of(torch.device("cpu"))


@pytest.fixture(params=["thread", "here"])
def thread(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor | None]:
    with ThreadPoolExecutor(1) as pool:
        yield pool if request.param == "thread" else None


def forward(name: str, stage: str, clip: int) -> Cascade:
    return Cascade(name, Phase.FORWARD, stage, (clip,), 1, 4, 0)


ORDER = [forward("a0", "a", 0), forward("a1", "a", 1), forward("b0", "b", 0), forward("b1", "b", 1)]


def batches(thread: ThreadPoolExecutor | None, prepared: list[str]) -> BatchPreparation:
    def make(cascade: Cascade) -> HostBatch:
        prepared.append(cascade.name)
        return HostBatch({"x": torch.full((1, 4), float(cascade.clips[0]))}, torch.zeros(1, 4), [0])

    return BatchPreparation(thread, make, RUNTIME.to_device, ORDER)


def test_stages_of_a_rank_share_what_one_micro_batch_gives_them(thread: ThreadPoolExecutor | None) -> None:
    prepared: list[str] = []
    preparation = batches(thread, prepared)
    for cascade in ORDER:
        preparation.start({})
        preparation.waiting({})
        batch, kept = preparation.take(cascade.name, {})
        arguments, _ = batch.ready()
        assert arguments["x"].tolist() == [[cascade.clips[0]] * 4]
        assert kept == [0]
    assert prepared == ["a0", "a1"]
    assert preparation.done


def test_an_argument_that_a_model_changed_in_place_is_made_again() -> None:
    prepared: list[str] = []
    preparation = batches(None, prepared)
    for cascade in ORDER:
        arguments, _ = preparation.take(cascade.name, {})[0].ready()
        assert arguments["x"].tolist() == [[cascade.clips[0]] * 4]
        arguments["x"].add_(1.0)
    assert prepared == ["a0", "a1", "b0", "b1"]
