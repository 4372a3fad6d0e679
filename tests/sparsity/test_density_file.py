"""Sparsity files: what is wrong is one message that names the file, the layer and the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import ByLength, layer_densities
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.stage_sizes import count_in
from arachnec.ir.verify import verify
from arachnec.passes.sparsify import Sparsify
from arachnec.sparsity.density_file import read_densities

GOLDEN = Path(__file__).parents[1] / "golden" / "sparsify"


def write(path: Path, layers: object, **changed: object) -> Path:
    file = path / "sparsity.json"
    file.write_text(json.dumps({"model": "Dit", "layers": layers, **changed}))
    return file


def test_densities_are_by_layer_and_head(tmp_path: Path) -> None:
    told = read_densities(write(tmp_path, [{"layer": 2, "heads": [0.1, 1.0]}]))
    assert told.layers == {2: ByLength((0.1, 1.0))}
    told.demand_of("Dit", 3, 2)


def test_a_layer_may_have_densities_of_classes_of_length_beside_those_of_the_others(tmp_path: Path) -> None:
    classes = [{"tokens": 4096, "heads": [0.05]}, {"tokens": 1024, "heads": [0.2]}]
    told = read_densities(write(tmp_path, [{"layer": 0, "heads": [0.1], "classes": classes}]))
    assert told.layers == {0: ByLength((0.1,), ((1024, (0.2,)), (4096, (0.05,))))}


def test_a_stage_says_what_a_file_says_of_classes_of_length(tmp_path: Path) -> None:
    case = (GOLDEN / "self_and_cross_attention.cascade").read_text()
    module = parse_module(case)
    (stage,) = (stage for stage in module.stages if stage.trained)
    heads = (0.1,) * count_in(stage, "heads")
    half = [x / 2 for x in heads]
    file = tmp_path / "sparsity.json"
    rows = [{"layer": 0, "heads": heads, "classes": [{"tokens": 4096, "heads": half}]}]
    file.write_text(json.dumps({"model": stage.attrs["source"], "layers": rows}))
    marked = Sparsify(file=str(file)).run(module)
    (stage,) = (stage for stage in marked.stages if stage.trained)
    assert {n: own.by_length for n, own in layer_densities(stage).items()} == {
        0: ByLength(heads, ((4096, tuple(half)),))
    }
    assert not verify(marked) and parse_module(print_module(marked)) == marked


def of_classes(*classes: tuple[int, list[float]]) -> list[dict[str, object]]:
    own = [{"tokens": tokens, "heads": heads} for tokens, heads in classes]
    return [{"layer": 0, "heads": [0.1], "classes": own}]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([{"layer": 0, "heads": [0.1, 0.0]}], "head 1 of layer 0 has the density 0"),
        ([{"layer": 0, "heads": [1.01]}], "head 0 of layer 0 has the density 1.01"),
        ([{"layer": 0, "heads": [1.0000001]}], "head 0 of layer 0 has the density 1.0000001"),
        ([{"layer": 0, "heads": [0.1]}, {"layer": 0, "heads": [0.1]}], "layer 0 is listed twice"),
        ([{"layer": 0, "heads": []}], "layer 0 lists no heads"),
        ([{"layer": 0, "head": [0.1]}], r"\$.layers\[0\]"),
        ("all", "Expected `array`"),
        (of_classes((1000, [0.1])), "layer 0 has a class of 1000 tokens; a class is named by the fewest tokens"),
        (of_classes((64, [0.1]), (64, [0.2])), "layer 0 lists the class 64 twice"),
        (of_classes((64, [0.1, 0.2])), "layer 0 has 1 heads, and 2 in the class 64"),
        (of_classes((64, [1.5])), "head 0 of layer 0, class 64, has the density 1.5"),
    ],
)
def test_a_file_that_says_no_densities_is_refused(tmp_path: Path, layers: object, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_densities(write(tmp_path, layers))


def test_text_that_is_no_json_and_other_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains unknown field `steps`"):
        read_densities(write(tmp_path, [], steps=3))
    file = tmp_path / "broken.json"
    file.write_text('{"model": NaN')
    with pytest.raises(UserError, match="cannot be read"):
        read_densities(file)


@pytest.mark.parametrize(
    ("model", "layers", "heads", "what"),
    [("Other", 1, 1, "of `Dit`, and this is `Other`"), ("Dit", 0, 1, "it has layer 0"), ("Dit", 1, 2, "1 heads there")],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, model: str, layers: int, heads: int, what: str) -> None:
    told = read_densities(write(tmp_path, [{"layer": 0, "heads": [0.1]}]))
    with pytest.raises(UserError, match=what):
        told.demand_of(model, layers, heads)
