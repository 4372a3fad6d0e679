"""Weights in a folder are matched with a model by name and shape; all that differs is one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from arachnec.ir.diagnostic import UserError, render_all
from arachnec.models.adapters import original_names
from arachnec.models.initial_weights import (
    beginning_weights,
    config_differences,
    demand_fit,
    folded,
    initial_weights,
    read_config,
)
from arachnec.models.weight_files import weight_files, write_weights


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
        self.head = nn.Linear(2, 3)


def stored(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def message(folder: Path, model: nn.Module | None = None) -> str:
    with pytest.raises(UserError) as raised:
        initial_weights(folder, model or Small())
    return render_all(raised.value.diagnostics)


def test_missing_surplus_and_wrong_shapes_are_one_message(tmp_path: Path) -> None:
    values = dict(Small().state_dict())
    for number in (0, 1, 3):
        del values[f"blocks.{number}.bias"]
    values["head.weight"] = torch.ones(3, 5)
    values["proj.weight"] = torch.ones(1)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "LargeModel"}))
    assert message(stored(tmp_path, values)) == (
        f"error: the weights in {tmp_path} are not those of Small:\n"
        "  they are a LargeModel's, says config.json\n"
        "  missing: blocks.0-1,3.bias\n"
        "  not the model's: proj.weight\n"
        "  of another shape: head.weight is 3 x 5, the model's 3 x 2\n"
        "  help: give the folder of this model's weights, or have build() make the model that its config.json describes"
    )


def test_names_of_a_wrapper_are_told_as_such(tmp_path: Path) -> None:
    told = message(stored(tmp_path, {f"module.{name}": value for name, value in Small().state_dict().items()}))
    assert "names that have no `module.` in front" in told


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    values = dict(Small().state_dict())
    values["head.weight"] = values["head.weight"].to(torch.float8_e4m3fn)
    assert "head.weight is F8_E4M3\n  help: convert them to bf16" in message(stored(tmp_path, values))


def test_pickles_and_empty_folders_are_refused(tmp_path: Path) -> None:
    assert "there is no .safetensors file in it" in message(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="is a pickle, which may run code"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{cut short")
    assert "model.safetensors cannot be read" in message(tmp_path)


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a": "../a.safetensors"}}', "{", '{"weight_map": {"a": "b.safetensors"}}']
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="cannot be read"):
        weight_files(tmp_path)


def test_what_is_written_in_shards_is_read_again(tmp_path: Path) -> None:
    values = {f"layer.{n}": torch.full((n + 1,), float(n)) for n in range(5)}
    held: list[str] = []
    write_weights(
        tmp_path,
        list(values),
        {n: v.nbytes for n, v in values.items()},
        lambda n: held.append(n) or values[n],
        shard_bytes=16,
    )  # type: ignore[func-returns-value]
    assert held == list(values)
    files = weight_files(tmp_path)
    assert {name: files.read(name).tolist() for name in files.tensors} == {n: v.tolist() for n, v in values.items()}
    assert len({entry.file for entry in files.tensors.values()}) == 4  # of 4 + 8, 12, 16 and 20 bytes
    (tmp_path / "model-copy").mkdir()
    other = write_weights(tmp_path / "model-copy", ["layer.0"], {"layer.0": 4}, lambda _: torch.ones(1))
    assert weight_files(other[0]).fingerprint() != files.fingerprint() == weight_files(tmp_path).fingerprint()


@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_of_peft_do_not_change_the_names_of_what_they_are_put_around(tmp_path: Path, wrapped: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["blocks.0", "blocks.2"], modules_to_save=["head"])
    folder, plain = stored(tmp_path, dict(Small().state_dict())), set(Small().state_dict())
    model = peft.get_peft_model(Small(), config) if wrapped else peft.inject_adapter_in_model(config, Small())
    assert {name for name in original_names(model).values() if name is not None} == plain
    weights = initial_weights(folder, model)
    assert set(weights.sources.values()) == plain
    weights.fill(model)
    prefix = "base_model.model." if wrapped else ""
    state, file = model.state_dict(), weight_files(folder)
    assert torch.equal(state[f"{prefix}blocks.2.base_layer.weight"], file.read("blocks.2.weight"))
    assert torch.equal(state[f"{prefix}head.modules_to_save.default.weight"], file.read("head.weight"))


@pytest.mark.parametrize("setting", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_an_adapter_that_was_made_of_other_weights_does_not_begin_a_run(
    tmp_path: Path, setting: dict[str, Any]
) -> None:
    """With the folder's weights put below it, it gives other outputs than the folder's model."""
    peft = pytest.importorskip("peft")
    folder = stored(tmp_path, dict(Small().state_dict()))

    def adapted(**settings: Any) -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["blocks.0"], **settings)
        model: nn.Module = peft.get_peft_model(Small(), config)
        return model

    with pytest.raises(UserError, match="is made of the weights that are there when it is added") as told:
        beginning_weights(folder, adapted(**setting))
    assert f"{next(iter(setting))}=" in str(told.value)
    assert initial_weights(folder, adapted(**setting)).sources  # what such a run has trained is still exported
    for drawn in (True, False, "gaussian"):
        assert beginning_weights(folder, adapted(init_lora_weights=drawn)).sources


def test_a_configuration_that_no_shape_shows_is_told(tmp_path: Path) -> None:
    model = Small()
    model.config = {"eps": 1e-6, "patch": (1, 2), "_name": 1}  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps({"eps": 1e-5, "patch": [1, 2], "_name": 2, "more": 3}))
    assert config_differences(tmp_path, model) == ["eps = 1e-05 there, 1e-06 here"]


def test_names_that_differ_in_a_block_are_folded() -> None:
    assert folded(["a.0.b", "a.2.b", "a.1.b", "a.1.c", "norm", "proj.1"]) == ["a.0-2.b", "a.1.c", "norm", "proj.1"]


def test_a_model_file_is_held_against_a_folder_without_its_values(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "from torch import nn\n\n\ndef build():\n    return nn.Linear(2, 2)\n\n\ndef sample(clip, generator):\n"
        "    return {}, None\n\n\ndef loss(prediction, target):\n    return prediction\n"
    )
    demand_fit(stored(tmp_path, dict(nn.Linear(2, 2).state_dict())), path)
    with pytest.raises(UserError, match="not the model's: more"):
        demand_fit(stored(tmp_path, {**nn.Linear(2, 2).state_dict(), "more": torch.ones(1)}), path)


@pytest.mark.parametrize(("text", "told"), [("[1]", "a JSON list, not an object"), ("{", "is not JSON")])
def test_a_config_that_is_no_object_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=told):
        read_config(tmp_path)
    (tmp_path / "empty").mkdir()
    assert read_config(tmp_path / "empty") == {}


@pytest.mark.parametrize(("name", "told"), [("notes.txt", r"it is no \.safetensors file"), ("model.pt", "is a pickle")])
def test_a_file_that_is_no_safetensors_is_refused(name: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=told):
        weight_files(tmp_path / name)
