"""``arachnec export``: what a run has trained is what ``from_pretrained`` and ``load_lora_adapter`` load."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from arachnec.checkpoint.class_states import CLASSES, ClassState, class_tensor
from arachnec.checkpoint.files import write_file
from arachnec.checkpoint.folder import Position, step_folder, write_commit
from arachnec.checkpoint.parts import Part
from arachnec.checkpoint.trained_predictors import FILE, TrainedLayer, trained_predictors
from arachnec.cli import run
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import MODEL
from arachnec.executable.training_options import Training
from arachnec.export.folder import Exported, export
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import ByLength
from arachnec.models.batch import make_batch, prediction_of
from arachnec.models.file import load_model_file
from arachnec.models.initial_weights import model_folder
from arachnec.models.weight_files import weight_files

pytest.importorskip("peft")
diffusers = pytest.importorskip("diffusers")

FULL = """
import torch
from peft import LoraConfig, get_peft_model
from arachnec.models.diffusers import wan

model = wan.text_to_video(num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=16, in_channels=4,
                          out_channels=4, text_dim=8, freq_dim=8)
sample, loss = model.sample, model.loss
CONFIG = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_out.0"], init_lora_weights=False)


def build():
    transformer = model.build()
    return transformer
"""
ADDED = FULL.replace("    return", "    transformer.requires_grad_(False).add_adapter(CONFIG)\n    return")
WRAPPED = FULL.replace("return transformer", "return get_peft_model(transformer, CONFIG)")
SAVED = WRAPPED.replace("init_lora_weights=False", "init_lora_weights=False, modules_to_save=['proj_out']")
OWN = FULL.replace(
    "    return",
    """
    class Own(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.base_layer, self.scale = base_layer, torch.nn.Parameter(torch.ones(1))

    transformer.proj_out = Own(transformer.proj_out)
    return""",
)
SECOND = ADDED.replace("    return", "    transformer.add_adapter(OTHER, adapter_name='second')\n    return").replace(
    "\n\ndef build",
    "\nOTHER = LoraConfig(r=3, lora_alpha=3, target_modules=['to_k'], init_lora_weights=False)\n\n\ndef build",
)
BOTH = SECOND.replace("    return", "    transformer.set_adapter(['default', 'second'])\n    return")
RENAMED = FULL.replace("    return", "    transformer.head = transformer.proj_out\n    return")


@dataclass
class Trained:
    """A model file, a checkpoint of it that two ranks wrote, and the model with the checkpoint's values."""

    executable: Any
    checkpoint: Path
    model: Any

    def __call__(self, output: Path, **options: Any) -> Exported:
        return export(self.executable, self.checkpoint, output, **options)


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Trained]:
    """Train the model of a source: every parameter that trains has moved, by 2 in its average."""

    def make(
        source: str,
        *,
        ema: bool = False,
        dtype: str = "fp32",
        init: Path | None = None,
        more: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Trained:
        path = tmp_path / "model.py"
        path.write_text(source)
        file = load_model_file(path)
        torch.manual_seed(4)  # the run's seed
        model: Any = file.build()
        state: dict[str, Tensor] = {f"buffer/{name}": value for name, value in model.named_buffers()} | dict(more)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if value.requires_grad:
                    value += 0.1 * torch.rand_like(value)
                    state[f"master/{name}"] = value.detach().clone()
                    state |= {f"ema/{name}": value.detach() + 2.0} if ema else {}
        folder = step_folder(tmp_path / "checkpoints", 7)
        folder.mkdir(parents=True)
        flat = {name: value.reshape(-1) for name, value in state.items()}
        halves = [
            {n: Part(v[: len(v) // 3], 0, len(v)) for n, v in flat.items()},
            {n: Part(v[len(v) // 3 :], len(v) // 3, len(v)) for n, v in flat.items()},
        ]
        records = [write_file(folder / f"rank-{rank:05d}.safetensors", parts) for rank, parts in enumerate(halves)]
        began = "" if init is None else weight_files(model_folder(init)).fingerprint()
        write_commit(folder, Position(7, 4, file.digest, 0, "", began), records)
        executable = SimpleNamespace(
            folder=tmp_path, digests={MODEL: file.digest}, training=Training(dtype=dtype), model_file=lambda: file
        )
        return Trained(executable, tmp_path / "checkpoints", model.eval())

    return make


@torch.no_grad()
def output(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    prediction: Tensor = model(
        hidden_states=torch.randn(1, 4, 2, 4, 4, generator=generator),
        timestep=torch.tensor([500.0]),
        encoder_hidden_states=torch.randn(1, 3, 8, generator=generator),
        return_dict=False,
    )[0]
    return prediction


def loaded(folder: Path, **options: Any) -> Any:
    """Copied out of the mapped file, where tensors are not aligned: some processors round their products otherwise."""
    return deepcopy(diffusers.WanTransformer3DModel.from_pretrained(folder, **options).eval())


def test_from_pretrained_gives_the_trained_model(trained: Callable[..., Trained], tmp_path: Path) -> None:
    run = trained(FULL)
    exported = run(tmp_path / "out", shard_bytes=10_000)
    assert torch.equal(output(loaded(tmp_path / "out")), output(run.model))
    assert len(exported.files) > 3  # shards, an index, the config
    again = run(tmp_path / "out")
    assert {path.name for path in again.files} == {"config.json", "diffusion_pytorch_model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in again.files}
    assert torch.equal(output(loaded(tmp_path / "out")), output(run.model))


def test_the_model_of_an_own_loop_is_written_with_its_model_file(
    trained: Callable[..., Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = trained(FULL)
    words = ["--checkpoint", str(finished.checkpoint), "-o", str(tmp_path / "out")]
    assert run(["export", str(tmp_path / "model.py"), *words]) == 0
    assert "after 7 steps" in capsys.readouterr().out
    assert torch.equal(output(loaded(tmp_path / "out")), output(finished.model))


def test_predictors_of_sparse_attention_lie_beside_the_weights(trained: Callable[..., Trained], tmp_path: Path) -> None:
    """Cut between two files of the checkpoint, whole in the export; a later export without them leaves none."""
    row = torch.tensor([0.7, 0.4, 0.3, 0.6, 1.0], dtype=torch.float64)
    sides = {f"predictor/{side}/blocks.0.0": torch.randn(2 * 4 * 3) for side in ("query", "key")}
    moments = {"predictor/exp_avg/query/blocks.0.0": torch.zeros(24)}
    by_class = {f"{CLASSES}blocks.0.0": class_tensor({1024: ClassState((0.5, 0.4), (0.5, 0.7), (1.0, 1.0))}, 2)}
    run = trained(FULL, more={"predictor/layer/blocks.0.0": row, **sides, **moments, **by_class})
    exported = run(tmp_path / "out")
    assert tmp_path / "out" / FILE in exported.files
    held = trained_predictors(tmp_path / "out")
    assert held.layers == {("blocks.0", 0): TrainedLayer(ByLength((0.3, 0.6), ((1024, (0.5, 0.7)),)), True)}
    query, key = held.projections(("blocks.0", 0), (2, 4, 3))
    assert torch.equal(query.flatten(), sides["predictor/query/blocks.0.0"])
    assert torch.equal(key.flatten(), sides["predictor/key/blocks.0.0"])
    assert trained_predictors(tmp_path / "checkpoints").layers == held.layers
    assert set(held.stored) == {"predictor/layer/blocks.0.0", *sides, *by_class}
    assert torch.equal(output(loaded(tmp_path / "out")), output(run.model))
    shutil.rmtree(tmp_path / "checkpoints")
    trained(FULL)(tmp_path / "out")
    assert not (tmp_path / "out" / FILE).exists()


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(
    "source", [ADDED, WRAPPED, SECOND], ids=["add_adapter", "get_peft_model", "the second of two, which is active"]
)
def test_an_adapter_is_added_in_or_a_file_of_its_own(
    trained: Callable[..., Trained], tmp_path: Path, source: str
) -> None:
    run = trained(source)
    run(tmp_path / "merged")
    torch.testing.assert_close(output(loaded(tmp_path / "merged")), output(run.model), rtol=1e-5, atol=1e-5)
    run(tmp_path / "lora", lora=True)
    torch.manual_seed(4)
    base: Any = load_model_file(_with(tmp_path / "plain.py", FULL)).build()
    assert not torch.allclose(output(base), output(run.model), atol=1e-3)
    pipeline = diffusers.WanPipeline(None, None, None, diffusers.FlowMatchEulerDiscreteScheduler(), base)
    pipeline.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(output(base), output(run.model), rtol=1e-5, atol=1e-5)


OTHER_FAMILIES = {
    "CogVideoX": """
import torch
from peft import LoraConfig
from arachnec.models.diffusers import cogvideox

model = cogvideox.text_to_video(num_layers=1, num_attention_heads=2, attention_head_dim=16, in_channels=4,
                                out_channels=4, text_embed_dim=16, time_embed_dim=8, sample_height=8, sample_width=8,
                                sample_frames=9)
""",
    "HunyuanVideo": """
import torch
from peft import LoraConfig
from arachnec.models.diffusers import hunyuan_video

model = hunyuan_video.text_to_video(num_layers=1, num_single_layers=1, num_refiner_layers=1, num_attention_heads=2,
                                    attention_head_dim=12, in_channels=4, out_channels=4, text_embed_dim=16,
                                    pooled_projection_dim=8, rope_axes_dim=(4, 4, 4))
""",
}
BUILT = """
sample, loss = model.sample, model.loss
CONFIG = LoraConfig(r=2, lora_alpha=6, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)


def build():
    transformer = model.build()
    return transformer
"""


@pytest.mark.parametrize("name", OTHER_FAMILIES)
@torch.no_grad()
def test_the_pipelines_of_other_families_load_the_adapters_file(
    trained: Callable[..., Trained], tmp_path: Path, name: str
) -> None:
    plain = OTHER_FAMILIES[name] + BUILT
    run = trained(plain.replace("    return", "    transformer.requires_grad_(False).add_adapter(CONFIG)\n    return"))
    run(tmp_path / "lora", lora=True)
    file = load_model_file(_with(tmp_path / "plain.py", plain))
    torch.manual_seed(4)
    base: Any = file.build().eval()
    arguments, _ = make_batch(file, [VideoClip("a", 5, 32, 48, 6, "a cat", None, 0)], 0, 3, "cpu")
    expected = prediction_of(run.model(**arguments))
    assert not torch.allclose(prediction_of(base(**arguments)), expected, atol=1e-3)
    kind = getattr(diffusers, f"{name}Pipeline")
    parts = dict.fromkeys(inspect.signature(kind.__init__).parameters.keys() - {"self"})
    pipeline = kind(**parts | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "transformer": base})
    pipeline.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(prediction_of(base(**arguments)), expected, rtol=1e-5, atol=1e-5)


OF_OWN = """
import torch
from peft import LoraConfig, get_peft_model


class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.out(self.into(x).tanh())


def build():
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["into", "out"], init_lora_weights=False)
    return get_peft_model(Mixer(), config)


def sample(clip, generator):
    x = torch.randn(1, clip.frames, 4, generator=generator)
    return {"x": x}, x


def loss(prediction, target):
    return (prediction - target).square().mean()
"""


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # of older ones, since the base had adapters
def test_the_adapter_of_a_class_that_loads_no_lora_file_is_written_for_peft(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    from peft import PeftModel

    run = trained(OF_OWN)
    exported = run(tmp_path / "lora", lora=True)
    assert {path.name for path in exported.files} == {"adapter_config.json", "adapter_model.safetensors"}
    torch.manual_seed(4)
    base: Any = load_model_file(tmp_path / "model.py").build().unload()
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1))
    expected = run.model(x)
    assert not torch.allclose(base(x), expected, atol=1e-3)
    again = PeftModel.from_pretrained(base, str(tmp_path / "lora"))
    torch.testing.assert_close(again(x), expected)


def test_frozen_weights_come_from_the_folder_that_the_run_began_with(
    trained: Callable[..., Trained], tmp_path: Path
) -> None:
    for seed, name in enumerate(("began", "other")):
        torch.manual_seed(100 + seed)
        plain: Any = load_model_file(_with(tmp_path / f"{name}.py", FULL)).build()
        plain.save_pretrained(tmp_path / name)
    run = trained(ADDED, init=tmp_path / "began")
    with pytest.raises(UserError, match="frozen weights of the checkpoint"):
        run(tmp_path / "out")
    with pytest.raises(UserError, match="did not begin with the weights in"):
        run(tmp_path / "out", init=tmp_path / "other")
    run(tmp_path / "out", init=tmp_path / "began")
    assert torch.equal(loaded(tmp_path / "out").proj_out.weight, loaded(tmp_path / "began").proj_out.weight)
    run(tmp_path / "lora", lora=True)
    kept = (tmp_path / "began" / "diffusion_pytorch_model.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds the weights of --init, which an export reads and does not overwrite"):
        run(tmp_path / "began", init=tmp_path / "began")
    assert (tmp_path / "began" / "diffusion_pytorch_model.safetensors").read_bytes() == kept
    config, weights = (tmp_path / "out" / name for name in ("config.json", "diffusion_pytorch_model.safetensors"))
    assert weights.stat().st_mode == config.stat().st_mode, "others may read it as they may read any file"


def test_averages_and_precision(trained: Callable[..., Trained], tmp_path: Path) -> None:
    run = trained(FULL, ema=True)
    run(tmp_path / "out", averages=True, dtype="bf16")
    model = loaded(tmp_path / "out", torch_dtype=torch.bfloat16)
    expected = (run.model.proj_out.weight + 2.0).bfloat16()
    assert torch.equal(model.proj_out.weight, expected)
    with safe_open(tmp_path / "out" / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert file.get_slice("proj_out.weight").get_dtype() == "BF16"
        assert file.get_slice("blocks.0.scale_shift_table").get_dtype() == "F32"  # as its class keeps it


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (FULL, {"averages": True}, "has no averages"),
        (FULL, {"lora": True}, "no adapter of peft"),
        (SAVED, {"lora": True}, "more than the adapter has trained.*proj_out"),
        (BOTH, {"lora": True}, "computes with the adapters default, second, and a LoRA file holds one"),
        (OWN, {}, "proj_out cannot be added into the layer below it: Own has no merge"),
        (RENAMED, {}, "has other tensors than WanTransformer3DModel makes.*more: head.bias, head.weight"),
        (FULL + "\n\ninner = build\n\n\ndef build():\n    model = inner()\n    model.proj_out.weight.data *= 1e8\n"
         "    return model\n", {"dtype": "fp16"}, "proj_out.weight has values up to .*e.0.*, which fp16 does not hold"),
    ],
    ids=["averages", "no-adapter", "modules-to-save", "two-adapters", "own-wrapper", "other-names", "fp16"],
)  # fmt: skip
def test_what_cannot_be_written_is_said_and_nothing_is_left(
    trained: Callable[..., Trained], tmp_path: Path, source: str, options: dict[str, Any], message: str
) -> None:
    run = trained(source)
    with pytest.raises(UserError, match=f"(?s){message}"):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_checkpoints_of_other_models_and_none_are_refused(trained: Callable[..., Trained], tmp_path: Path) -> None:
    run = trained(FULL)
    run.executable.digests[MODEL] = "0" * 64
    with pytest.raises(UserError, match="was not made with the model file"):
        run(tmp_path / "out")
    (run.checkpoint / "step-00000007" / "rank-00001.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="holds no whole checkpoint"):
        run(tmp_path / "out")


def _with(path: Path, source: str) -> Path:
    path.write_text(source)
    return path
