"""Clusters from short forms and TOML files."""

from pathlib import Path

import pytest

from arachnec.cluster.device_specs import DEVICE_SPECS, find_device_specs
from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import named
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import quantity

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.toml"))


def message(text: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        parse_cluster(text)
    assert len(caught.value.diagnostics) == 1
    return render(caught.value.diagnostics[0])


def test_a_short_form_is_nodes_times_gpus_of_a_device() -> None:
    cluster = parse_cluster("2x8:h100-80g")
    assert (cluster.nodes, cluster.gpus, cluster.world) == (2, 8, 16)
    assert cluster.attrs["nics"] == "AABBCCDD"


def test_a_short_form_without_nodes_is_one_node() -> None:
    assert parse_cluster("4:cpu").world == 4


def test_an_unknown_device_is_answered_with_all_there_are_the_nearest_first() -> None:
    said = message("2x8:h20x")
    assert "Known are h20-96g, " in said
    assert all(name in said for name in DEVICE_SPECS)


def test_a_device_is_found_by_its_short_name_in_either_case() -> None:
    assert parse_cluster("1x8:H100").attrs["device"] == "h100-80g"
    assert find_device_specs("A100") is DEVICE_SPECS["a100-80g"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_cluster(path: Path) -> None:
    assert parse_cluster(path).world >= 1


def test_a_file_overrides_the_device_specs(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "pod"\nnodes = 2\ngpus = 4\ndevice = "h100"\ninter = "12.5 GB/s"\n')
    cluster = parse_cluster(file)
    assert cluster.name == "pod"
    assert quantity(cluster.attrs["inter"]) == 12.5
    assert quantity(cluster.attrs["intra"]) == DEVICE_SPECS["h100-80g"].intra
    assert "nics" not in cluster.attrs, "the device specs' map is of a node of eight"


def test_sustained_flops_are_a_stated_part_of_the_peak() -> None:
    for specs in DEVICE_SPECS.values():
        assert 0 < specs.efficiency < 1
        assert specs.source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x8:h100-80g", "no GPUs"),
        ("2x0:cpu", "no GPUs"),
        ("2x8:h10", "did you mean `h100`?"),
        ("nowhere.toml", "neither a cluster file nor a short form"),
    ],
)
def test_a_wrong_short_form_gets_one_message_with_a_remedy(text: str, expected: str) -> None:
    said = message(text)
    assert expected in said
    assert "help:" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('nodes = 1\ngpus = 0\ndevice = "cpu"\n', "no GPUs"),
        ('nodes = 1\ngpu = 8\ndevice = "cpu"\n', "did you mean `gpus`?"),
        ('nodes = 1\ndevice = "cpu"\n', "has no `gpus`"),
        ("gpus = 2\n", "has no `device`"),
        ('gpus = 2\ndevice = "tpu"\n', "unknown device `tpu`"),
        ('gpus = 2\ndevice = "cpu"\nmemory = 8\n', "with its unit"),
        ('gpus = 2\ndevice = "cpu"\nmemory = "8 GB/s"\n', "with its unit"),
        ('gpus = 2\ndevice = "cpu"\nmemory = "1.2.3 GiB"\n', "with its unit"),
        ('gpus = 2\ndevice = "cpu"\nnics = "A"\n', "one letter for each of the 2 devices"),
        ('gpus = "2"\ndevice = "cpu"\n', "a whole number"),
        ("gpus = \n", "not TOML"),
    ],
)
def test_a_wrong_file_gets_one_message_with_its_line(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    said = message(file)
    assert expected in said
    assert f"--> {file}:" in said


def test_an_unknown_device_needs_every_quantity() -> None:
    cluster = parse_cluster(Path(__file__).parents[2] / "examples" / "clusters" / "any_device.toml")
    assert cluster.attrs["device"] == "mi300x"
    assert quantity(cluster.attrs["flops"]) == 400


@pytest.mark.parametrize("value", ["1e999 us", "1e300 us", "1e-300 us"])
def test_a_number_that_no_plan_takes_is_told_with_its_line_and_what_one_would(value: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'gpus = 4\ndevice = "cpu"\nlatency = "{value}"\n')
    said = message(file)
    assert "c.toml:3:1" in said and "1e-09 to 1e+15 us" in said


def test_what_is_wrong_in_a_group_is_told_with_the_line_of_that_group(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    group = '[[group]]\nnodes = {}\ndevice = "h100"\nmemory = "{} GiB"\n'
    for nodes, memory, line in ((1, 0, 10), (0, 80, 8)):
        file.write_text("gpus = 4\n\n" + group.format(1, 80) + group.format(nodes, memory))
        assert f"c.toml:{line}:1" in message(file)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('gpus = 4\ndevice = "cpu"\n', encoding="utf-8-sig")
    assert parse_cluster(file).world == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8:h100-80g", "8 x h100-80g"),
        ("2x8:h100-80g", "2 x 8 x h100-80g"),
        ("1x8:h100-80g+2x8:a100-80g", "1 x 8 x h100-80g + 2 x 8 x a100-80g"),
    ],
)
def test_a_cluster_is_named_by_its_devices(text: str, words: str) -> None:
    assert named(parse_cluster(text)) == words
