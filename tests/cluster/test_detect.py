"""`arachnec cluster detect`: from what NVIDIA's tools print to a cluster file that loads."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from arachnec.cli import run
from arachnec.cluster.detect import detected as this_machine
from arachnec.cluster.detect import parse_matrix, shown_devices
from arachnec.cluster.device_specs import DEVICE_SPECS, find_device_specs
from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Cluster, quantity

MACHINES = Path(__file__).parent / "machines"


def detected(tmp_path: Path, *files: str) -> tuple[Cluster, str]:
    out = tmp_path / "found.toml"
    given = [word for file in files for word in ("--from", str(MACHINES / file))]
    assert run(["cluster", "detect", *given, "-o", str(out)]) == 0
    return parse_cluster(out), out.read_text(encoding="utf-8")


def test_a_dgx_h100_has_a_nic_for_each_gpu_and_two_for_none(tmp_path: Path) -> None:
    cluster, text = detected(tmp_path, "dgx_h100.topo.txt", "dgx_h100.csv")
    assert (cluster.nodes, cluster.gpus, cluster.attrs["device"]) == (1, 8, "h100-80g")
    assert quantity(cluster.attrs["intra"]) == 450
    assert cluster.attrs["nics"] == "ABCDEFGH"
    assert "B: mlx5_2 (PXB from GPU1)" in text
    assert "nearest to no GPU: mlx5_1, mlx5_6" in text
    assert "NUMA: 0: GPU0 GPU1 GPU2 GPU3; 1: GPU4" in text
    assert "# how many there are is not known" in text
    assert "assumed: how fast a NIC is" in text


def test_an_older_matrix_names_its_nics_in_the_header(tmp_path: Path) -> None:
    cluster, text = detected(tmp_path, "a100x8.csv", "a100x8.topo.txt")
    assert cluster.attrs["device"] == "a100-80g"
    assert quantity(cluster.attrs["intra"]) == 300
    assert cluster.attrs["nics"] == "AABBCCDD"
    assert "C: mlx5_2 (PXB from GPU4 GPU5)" in text


def test_gpus_on_pcie_share_the_host(tmp_path: Path) -> None:
    cluster, text = detected(tmp_path, "l20x8.topo.txt", "l20x8.csv")
    assert cluster.attrs["device"] == "l20-48g"
    assert quantity(cluster.attrs["host"]) == DEVICE_SPECS["l20-48g"].host
    assert cluster.attrs["nics"] == "AAAAAAAA"
    assert "4 pairs PIX" in text
    assert "16 pairs SYS" in text
    assert "NODE from GPU0 GPU1 GPU2 GPU3; SYS from GPU4" in text


def test_one_gpu_is_a_node_of_one(tmp_path: Path) -> None:
    cluster, text = detected(tmp_path, "one_gpu.topo.txt", "one_gpu.csv")
    assert (cluster.world, cluster.attrs["device"]) == (1, "h20-96g")
    assert "No NIC was seen" in text


def test_a_matrix_alone_leaves_the_device_to_a_guess_that_says_so(tmp_path: Path) -> None:
    cluster, text = detected(tmp_path, "dgx_h100.topo.txt")
    assert cluster.gpus == 8
    assert "a guess from the links" in text
    assert "h200-141g, h20-96g have the same" in text
    assert detected(tmp_path, "l20x8.topo.txt")[0].attrs["device"] == "l20-48g"


def test_a_list_of_devices_alone_leaves_the_links_to_the_device_specs(tmp_path: Path) -> None:
    cluster, text = detected(tmp_path, "a100x8.csv")
    assert quantity(cluster.attrs["intra"]) == DEVICE_SPECS["a100-80g"].intra
    assert "joined is not known" in text


def test_other_memory_than_the_specs_is_written_down(tmp_path: Path) -> None:
    listed = tmp_path / "gpus.csv"
    listed.write_text("index, name, memory.total [MiB]\n0, NVIDIA A100-PCIE-40GB, 40960 MiB\n")
    assert quantity(detected(tmp_path, str(listed))[0].attrs["memory"]) == 40


def test_an_unknown_device_says_what_to_fill_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, out = tmp_path / "gpus.csv", tmp_path / "found.toml"
    listed.write_text("index, name, memory.total [MiB]\n0, NVIDIA GeForce RTX 4090, 24564 MiB\n")
    matrix = str(MACHINES / "one_gpu.topo.txt")
    assert run(["cluster", "detect", "--from", str(listed), "--from", matrix, "-o", str(out)]) == 0
    text = out.read_text()
    assert 'device = "nvidia-geforce-rtx-4090"' in text
    assert run(["plan", "examples/tables/four_tasks.json", "--cluster", str(out)]) == 2
    assert "unknown device `nvidia-geforce-rtx-4090`" in capsys.readouterr().err
    filled = (
        text.replace('# flops = "...', 'flops = "80').replace("# latency", "latency").replace("# inter_l", "inter_l")
    )
    out.write_text(filled)
    assert parse_cluster(out).world == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: "", "neither a link matrix nor a list of devices"),
        (lambda text: "hello\n", "neither a link matrix nor a list of devices"),
        (lambda text: text.replace("NV18\tNV18", "NV18\tNVxx", 1), "`NVxx` between GPU0"),
        (lambda text: "\n".join(text.split("\n")[:5]), "there is no row for GPU4"),
        (lambda text: text[:900], "cells"),
        (lambda text: text.replace("PXB", "SYS", 1), "the other way"),
        (lambda text: text.replace(" X ", "SYS", 1), "`SYS` between GPU0 and GPU0"),
    ],
)
def test_a_damaged_matrix_gets_one_message_with_its_line(
    change: object, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "topo.txt"
    assert callable(change)
    file.write_text(change((MACHINES / "dgx_h100.topo.txt").read_text()))
    assert run(["cluster", "detect", "--from", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error:") == 1
    assert expected in said.err
    assert f"--> {file}:" in said.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("index, name, memory.total [MiB]\n", "it lists none"),
        ("index, memory.total [MiB]\n0, 3 MiB\n", "no column `name`"),
        ("index, name, memory.total [MiB]\n0, NVIDIA H100\n", "2 values for 3 columns"),
        ("index, name, memory.total [MiB]\n0, NVIDIA H100, [N/A]\n", "no memory in MiB"),
        (
            "index, name, memory.total [MiB]\n0, NVIDIA H100, 81559 MiB\n1, NVIDIA A100, 81920 MiB\n",
            "different devices",
        ),
    ],
)
def test_a_damaged_list_of_devices_gets_one_message(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpus.csv"
    file.write_text(text)
    assert run(["cluster", "detect", "--from", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    assert expected in said


def test_files_of_two_machines_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(MACHINES / name) for name in ("dgx_h100.topo.txt", "one_gpu.csv")]
    assert run(["cluster", "detect", "--from", files[0], "--from", files[1]]) == 2
    assert "has 8 GPUs, the list of devices 1" in capsys.readouterr().err


def test_without_gpus_it_says_so_and_describes_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert run(["cluster", "detect"]) == 0
    said = capsys.readouterr()
    assert "no GPU was found" in said.err
    out = tmp_path / "here.toml"
    out.write_text(said.out)
    cluster = parse_cluster(out)
    assert (cluster.world, cluster.attrs["device"]) == (len(os.sched_getaffinity(0)), "cpu")


def test_the_machine_at_hand_is_asked_by_its_own_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!/bin/sh\ncase $1 in topo) saved=topo.txt;; *) saved=csv;; esac\nexec /bin/cat {MACHINES}/l20x8.$saved\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert run(["cluster", "detect"]) == 0
    assert 'device = "l20-48g"' in capsys.readouterr().out


def test_the_drivers_library_is_asked_where_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    library = types.ModuleType("pynvml")
    answers: dict[str, object] = {
        "NVMLError": type("NVMLError", (Exception,), {}),
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=143771 * 2**20),
    }
    for name, value in answers.items():
        setattr(library, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["cluster", "detect"]) == 0
    printed = capsys.readouterr().out
    assert 'device = "h200-141g"' in printed
    assert "gpus = 2" in printed


def test_every_known_device_has_a_short_form() -> None:
    for specs in DEVICE_SPECS.values():
        assert parse_cluster(f"2x4:{specs.name}").attrs["device"] == specs.name
        assert find_device_specs(specs.name.split("-")[0]) is specs


def test_nearest_nics_are_those_that_no_other_is_nearer_than() -> None:
    matrix = parse_matrix((MACHINES / "dgx_h100.topo.txt").read_text(), "saved")
    assert matrix.nearest_nics("GPU5") == ("NIC7",)
    assert matrix.nvlinks("GPU0", "GPU7") == 18
    assert matrix.names["NIC3"] == "mlx5_3"
    assert matrix.numa["GPU6"] == "1"


def test_auto_is_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "here.toml").write_text(this_machine(), encoding="utf-8")
    assert parse_cluster("auto") == parse_cluster(tmp_path / "here.toml")
    assert str(parse_cluster("auto").attrs["device"]) == "cpu"


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2, 0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f3c"}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "1,9"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1", "RANK": "1"}, [0, 1, 2, 3]),
    ],
)
def test_hidden_devices_are_not_detected(environment: dict[str, str], shown: list[int]) -> None:
    assert shown_devices(environment, 4) == shown
