"""Which GPU a rank takes, and what is said before the first collective where the ranks' devices do not go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from arachnec.cluster.device_agreement import check_devices
from arachnec.cluster.device_selection import DeviceRecord, Gpu, TorchDevices, select_device, use_device
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cluster
from arachnec.ir.values import Attributes, Quantity

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True)
class Node:
    """A host as one rank sees it: the GPUs that torch shows it, and how many the driver knows."""

    gpus: tuple[Gpu, ...]
    present: int
    torch: str = "2.13.0"
    nccl: str = "2.28.9"

    def visible(self) -> int:
        return len(self.gpus)

    def installed(self) -> int:
        return self.present

    def describe(self, index: int) -> Gpu:
        return self.gpus[index]

    def versions(self) -> dict[str, str]:
        return {"torch": self.torch, "NCCL": self.nccl}


def gpus(count: int, name: str = H100, memory: float = 79.2, host: str = "") -> tuple[Gpu, ...]:
    return tuple(Gpu(name, memory, f"GPU-{host}{index}") for index in range(count))


def record(rank: int, node: Node, *, ranks: int = 8, cpu: bool = False, mask: str | None = None) -> DeviceRecord:
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    if mask is not None:
        environment["CUDA_VISIBLE_DEVICES"] = mask
    return msgspec.structs.replace(select_device(cpu, environment, node), host=f"gpu-{rank // ranks}")


def run_of(nodes: Sequence[Callable[[int], Node]]) -> list[DeviceRecord]:
    """Eight ranks on each node; a node says what each of its local ranks sees."""
    return [record(8 * number + local, node(local)) for number, node in enumerate(nodes) for local in range(8)]


def whole(_: int) -> Node:
    return Node(gpus(8), 8)


def one_each(local: int) -> Node:
    return Node((gpus(8)[local],), 8)


def lost_one(local: int) -> Node:
    return Node(gpus(7), 7)


def hidden(local: int) -> Node:
    return Node((), 8)


def without(local: int) -> Node:
    return Node((), 0)


def old_torch(local: int) -> Node:
    return replace(whole(local), torch="2.12.1")


def old_nccl(local: int) -> Node:
    return replace(whole(local), nccl="2.27.5")


def a100(local: int) -> Node:
    return Node(gpus(8, A100, 79.3), 8)


def cluster(device: str = "h100-80g", memory: float = 79.0, **more: Any) -> Cluster:
    return Cluster(
        "pod",
        Attributes.of(
            nodes=2, gpus=8, device=device, memory=Quantity(memory, "GiB"), flops=Quantity(300.0, "TFLOP/s"),
            intra=Quantity(450.0, "GB/s"), inter=Quantity(50.0, "GB/s"), latency=Quantity(10.0, "us"),
            inter_latency=Quantity(20.0, "us"), **more,
        ),
    )  # fmt: skip


def message(records: Sequence[DeviceRecord], planned: Cluster | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check_devices(records, planned)
    return "\n".join(d.message + "\n" + d.text(d.help) for d in caught.value.diagnostics)


@pytest.mark.parametrize(("node", "index"), [(whole, 5), (one_each, 0)])
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_it_is_shown(
    node: Callable[[int], Node], index: int
) -> None:
    taken = record(5, node(5))
    assert (taken.kind, taken.index, taken.uuid) == ("cuda", index, "GPU-5")
    assert check_devices(run_of([node, node]), cluster()) == ()


def test_a_task_that_is_shown_one_gpu_uses_torchs_first_device_whatever_its_local_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = SimpleNamespace(name=H100, total_memory=79.2 * 2**30, uuid="GPU-5")
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", [shown].__getitem__)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    environment = {"RANK": "13", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "5"}
    taken = select_device(False, environment, TorchDevices())
    assert (taken.index, taken.name, taken.uuid, taken.visible) == (0, H100, "GPU-5", 1)
    assert use_device(taken) == torch.device("cuda", 0)
    assert current == [torch.device("cuda", 0)]


def test_the_cpu_is_taken_where_it_was_planned_hidden_on_purpose_or_all_there_is() -> None:
    assert record(0, whole(0), cpu=True).kind == "cpu"
    assert record(0, hidden(0), mask="").kind == "cpu"
    assert record(0, without(0)).kind == "cpu"
    assert record(0, hidden(0)).kind == "cuda"
    assert check_devices(run_of([without, without]), cluster()) == ()


def test_a_lost_gpu_is_named_with_its_host_and_rank_and_what_is_visible() -> None:
    text = message(run_of([whole, lost_one]), cluster())
    assert "rank 15 on host gpu-1 has no GPU: 7 visible to rank 15 for 8 ranks on the host, 7 installed" in text
    assert "CUDA_VISIBLE_DEVICES is not set" in text
    assert "--exclude=gpu-1" in text
    assert text.count("\n") == 1


def test_gpus_that_torch_cannot_use_are_no_reason_for_the_cpu() -> None:
    text = message(run_of([whole, hidden]), cluster())
    assert "ranks 8-15 on host gpu-1 have no GPU: 0 visible to rank 8 for 8 ranks on the host, 8 installed" in text


def test_two_ranks_that_are_shown_one_gpu_are_named() -> None:
    shown_one = [record(rank, Node(gpus(1), 1), ranks=2, mask="0") for rank in range(2)]
    text = message(shown_one)
    assert f"ranks 0-1 on host gpu-0 would share one GPU ({H100}, 1 visible to rank 0 for 2 ranks" in text
    assert "CUDA_VISIBLE_DEVICES=0" in text


def test_equal_gpus_of_two_hosts_are_two() -> None:
    records = [record(rank, Node(gpus(1), 1), ranks=1) for rank in range(2)]
    assert check_devices(records) == ()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((without, whole), "ranks 0-7 would run on the CPU, ranks 8-15 on GPUs"),
        ((whole, without), "ranks 8-15 would run on the CPU, ranks 0-7 on GPUs"),
        ((whole, old_torch), "ranks 8-15 have torch 2.12.1, ranks 0-7 2.13.0"),
        ((whole, old_nccl, whole), "ranks 8-15 have NCCL 2.27.5, ranks 0-7, 16-23 2.28.9"),
        ((whole, a100, whole), f"ranks 8-15 have {A100}, ranks 0-7, 16-23 {H100}"),
    ],
)
def test_ranks_that_differ_are_named_in_one_message(nodes: Sequence[Callable[[int], Node]], expected: str) -> None:
    text = message(run_of(nodes), cluster())
    assert expected in text
    assert text.count("\n") == 1


def test_a_cluster_of_two_kinds_expects_both() -> None:
    row = Quantity(79.0, "GiB"), Quantity(300.0, "TFLOP/s"), Quantity(450.0, "GB/s")
    mixed = cluster(mixed=((1, "h100-80g", *row), (1, "a100-80g", *row)))
    assert check_devices(run_of([whole, a100]), mixed) == ()
    notes = check_devices(run_of([a100, whole]), mixed)
    assert f"planned for a100-80g, run on {H100}: planned times do not apply" in notes


def test_another_device_than_planned_is_a_note_and_a_smaller_one_a_mistake() -> None:
    assert check_devices(run_of([a100, a100]), cluster()) == (
        f"planned for h100-80g, run on {A100}: planned times do not apply",
    )
    text = message(run_of([whole, whole]), cluster("h200-141g", 139.0))
    assert f"ranks 0-15 have {H100} with 79 GiB, the plan is for h200-141g with 139 GiB" in text
    assert "compile again with --cluster" in text
