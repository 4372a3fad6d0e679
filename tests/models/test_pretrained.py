"""What docs/fine_tuning.md shows works on pretrained folders, here of tiny models."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError, render_all
from arachnec.models.adapters import original_names
from arachnec.models.batch import make_batch, prediction_of
from arachnec.models.file import ModelFile, load_model_file
from arachnec.models.initial_weights import encoder_weights, initial_weights

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

PAGE = Path(__file__).parents[2] / "docs" / "fine_tuning.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("WanTransformer3DModel", {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16, "in_channels": 4,
        "out_channels": 4, "text_dim": 16, "freq_dim": 8,
    }),
    "cogvideox": ("CogVideoXTransformer3DModel", {
        "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
        "text_embed_dim": 16, "time_embed_dim": 8, "sample_height": 8, "sample_width": 8, "sample_frames": 9,
        "use_rotary_positional_embeddings": True,
    }),
    "hunyuan_video": ("HunyuanVideoTransformer3DModel", {
        "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2,
        "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_embed_dim": 16,
        "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 4),
    }),
}  # fmt: skip
CLIP = VideoClip("a", 9, 32, 48, 6, "a cat", None, 0)


@dataclass(frozen=True)
class Pretrained:
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=list(TINY))
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp(request.param)
    kind, config = TINY[request.param]
    torch.manual_seed(11)
    model = getattr(diffusers, kind)(**config)
    model.save_pretrained(folder / "transformer")
    return Pretrained(folder, model.eval())


def documented(pretrained: Pretrained) -> ModelFile:
    """The page's model file for this family, with this folder in the place of the one in /data."""
    name = next(name for name, (kind, _) in TINY.items() if kind == type(pretrained.model).__name__)
    source = next(text for text in EXAMPLES if f"import {name}\n" in text)
    path = pretrained.folder / "model.py"
    source = re.sub(r'"/data/[^"]*"', f'"{pretrained.folder}"', source)
    path.write_text(source.replace("bfloat16", "float32"))
    return load_model_file(path)


@torch.no_grad()
def test_the_documented_model_file_begins_with_the_folders_weights(pretrained: Pretrained) -> None:
    file = documented(pretrained)
    with torch.device("meta"):
        planned = file.build()
    weights = initial_weights(pretrained.folder, planned)
    model = file.build().eval()
    weights.fill(model)
    arguments, _ = make_batch(file, [CLIP], 0, 3, "cpu")
    assert torch.equal(prediction_of(model(**arguments)), prediction_of(pretrained.model(**arguments)))
    adapters = {name for name, plain in original_names(model).items() if plain is None}
    trains = {name for name, value in model.named_parameters() if value.requires_grad}
    assert trains == (adapters or set(pretrained.model.state_dict()))


def test_targets_that_match_nothing_are_one_message(pretrained: Pretrained) -> None:
    path = Path(documented(pretrained).path)
    path.write_text(re.sub(r"target_modules=\[.*?\]", 'target_modules=["query"]', path.read_text()))
    if "target_modules" not in path.read_text():
        pytest.skip("the page trains all weights of this family")
    with pytest.raises(UserError) as raised:
        load_model_file(path).build()
    text = render_all(raised.value.diagnostics)
    assert "Target modules {'query'} not found in the base model" in text
    assert "LoRA's target_modules name layers as model.named_modules() does" in text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('wan.text_to_video("/nowhere/Wan2.1")', "/nowhere/Wan2.1 has no config.json of a Wan transformer\n"),
        ('wan.text_to_video("{other}")', "has no config.json of a Wan transformer, but a MochiTransformer3DModel's"),
        ('wan.text_to_video("{newer}")', "`Wan` has no configuration key `num_layer`"),
        ('pipeline_encoders("{other}")', "is no pipeline's folder: it has no model_index.json"),
        ('pipeline_encoders("{unknown}")', "how MochiPipeline encodes captions is not known here"),
        ('pipeline_encoders("{hunyuan}")', "is no pipeline's folder: it has no tokenizer_2/"),
        ('pipeline_encoders("{parts}")', "is no pipeline's folder: it has no vae/"),
    ],
)
def test_a_folder_that_will_not_do_is_one_message(tmp_path: Path, source: str, message: str) -> None:
    written = {
        "other/config.json": {"_class_name": "MochiTransformer3DModel"},
        "newer/config.json": {"_class_name": "WanTransformer3DModel", "num_layer": 1},
        "unknown/model_index.json": {"_class_name": "MochiPipeline"},
        "hunyuan/model_index.json": {"_class_name": "HunyuanVideoPipeline"},
        "parts/model_index.json": {"_class_name": "WanPipeline"},
    }
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    for part in ("vae", "text_encoder", "tokenizer", "text_encoder_2"):
        (tmp_path / "hunyuan" / part).mkdir()
    folders = {name.split("/")[0]: tmp_path / name.split("/")[0] for name in written}
    path = tmp_path / "model.py"
    path.write_text(
        "from arachnec.models.diffusers import wan\n"
        "from arachnec.models.diffusers.pretrained import pipeline_encoders\n" + source.format(**folders)
    )
    with pytest.raises(UserError) as raised:
        load_model_file(path)
    assert message in render_all(raised.value.diagnostics)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from examples.finetune.pretrained import main

    folder = tmp_path_factory.mktemp("pipeline")
    main(str(folder))
    yield folder


@torch.no_grad()
@pytest.mark.parametrize("caption", ["a cat", " a  cat &amp;amp;\n\tdog "])
@pytest.mark.parametrize("kind", ["WanPipeline", "CogVideoXPipeline"])
def test_captions_are_encoded_as_the_pipeline_does(pipeline: Path, kind: str, caption: str) -> None:
    from arachnec.models.diffusers.pretrained import pipeline_encoders

    tidied = inspect.getsource(importlib.import_module("diffusers.pipelines.wan.pipeline_wan").basic_clean)
    if kind == "WanPipeline" and "is_ftfy_available" not in tidied:
        pytest.importorskip("ftfy", reason="this Diffusers tidies Wan's captions with nothing else")
    index = pipeline / "model_index.json"
    index.write_text(index.read_text().replace("WanPipeline", kind).replace("CogVideoXPipeline", kind))
    with torch.device("meta"):
        planned = pipeline_encoders(pipeline)
    assert all(parameter.is_meta for encoder in planned.values() for parameter in encoder.parameters())
    encoders: Any = pipeline_encoders(pipeline, text_dtype=torch.float32)
    for name, encoder in encoders.items():
        weights = encoder_weights(pipeline, name, encoder)
        assert weights is not None
        weights.fill(encoder)
    stored = load_file(pipeline / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in encoders["vae"].vae.state_dict().items())
    text = transformers.UMT5EncoderModel.from_pretrained(pipeline / "text_encoder").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(pipeline / "tokenizer")
    clip = VideoClip("a", 1, 16, 16, 12, caption, None, 0)  # of 12 tokens, 6 are those of "a cat"
    ours = encoders["text"](encoders["text"].load(clip, "cpu"))
    theirs: Any = object.__new__(getattr(diffusers, kind))
    theirs.__dict__.update(_internal_dict={}, text_encoder=text, tokenizer=tokenizer)
    given = {"prompt": caption, "max_sequence_length": 12, "device": torch.device("cpu"), "dtype": torch.float32}
    expected = theirs._get_t5_prompt_embeds(**given)
    assert torch.equal(ours, expected)
    if caption == "a cat":
        assert bool((expected[0, 6:] == 0).all()) == (kind == "WanPipeline")


@torch.no_grad()
@pytest.mark.parametrize("caption", ["a cat", "", "a cat " * 200])
@pytest.mark.parametrize(("kind", "most"), [("WanPipeline", 512), ("CogVideoXPipeline", 226)])
def test_counted_captions_give_the_embeddings_of_encode_prompt(
    pipeline: Path, kind: str, most: int, caption: str
) -> None:
    """Also where they are cut, and with the padding that the pipeline gives the transformer."""
    from arachnec.models.diffusers.common import text_embeddings
    from arachnec.models.diffusers.pretrained import pipeline_encoders

    index = pipeline / "model_index.json"
    index.write_text(index.read_text().replace("WanPipeline", kind).replace("CogVideoXPipeline", kind))
    encoder: Any = pipeline_encoders(pipeline, text_dtype=torch.float32)["text"]
    weights = encoder_weights(pipeline, "text", encoder)
    assert weights is not None
    weights.fill(encoder)
    counted = encoder.tokenization.count(caption)
    assert (counted > most) == (len(caption) > most)
    clip = VideoClip("a", 1, 16, 16, min(counted, most), caption)
    clip = replace(clip, encoded={"text": encoder(encoder.load(clip, "cpu"))})
    ours, _ = text_embeddings(clip, kind, 64, most)
    theirs: Any = object.__new__(getattr(diffusers, kind))
    text = transformers.UMT5EncoderModel.from_pretrained(pipeline / "text_encoder").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(pipeline / "tokenizer")
    theirs.__dict__.update(_internal_dict={}, text_encoder=text, tokenizer=tokenizer)
    given = {"max_sequence_length": most, "device": torch.device("cpu"), "dtype": torch.float32}
    expected, _ = theirs.encode_prompt(caption, do_classifier_free_guidance=False, **given)
    torch.testing.assert_close(ours, expected)


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A HunyuanVideo pipeline's folder without its transformer, tiny."""
    folder = tmp_path_factory.mktemp("hunyuan")
    torch.manual_seed(5)
    llama = transformers.LlamaConfig(
        vocab_size=384, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, pad_token_id=0
    )
    clip = transformers.CLIPTextConfig(
        vocab_size=384, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, eos_token_id=1
    )
    transformers.LlamaModel(llama).save_pretrained(folder / "text_encoder")
    transformers.CLIPTextModel(clip).save_pretrained(folder / "text_encoder_2")
    for tokenizer in ("tokenizer", "tokenizer_2"):
        transformers.ByT5Tokenizer().save_pretrained(folder / tokenizer)
    vae = diffusers.AutoencoderKLHunyuanVideo(block_out_channels=(4, 4, 4, 4), norm_num_groups=2, latent_channels=4)
    vae.save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "HunyuanVideoPipeline"}))
    return folder


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0"])
def test_hunyuan_videos_captions_with_an_older_transformers_are_one_message(
    hunyuan: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    from arachnec.models.diffusers.pretrained import pipeline_encoders

    monkeypatch.setattr(importlib.import_module("transformers"), "__version__", version)
    with pytest.raises(UserError) as raised:
        pipeline_encoders(hunyuan)
    text = render_all(raised.value.diagnostics)
    assert f"HunyuanVideo's captions need transformers 5.4, and {version} is installed" in text


@torch.no_grad()
@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 4), reason="refused with an older one"
)
@pytest.mark.parametrize(("caption", "tokens"), [("a cat", 12), ("a cat", 7), ("a cat in a hat {on a mat}", 12)])
def test_hunyuan_videos_captions_are_encoded_as_its_pipeline_does(
    hunyuan: Path, monkeypatch: pytest.MonkeyPatch, caption: str, tokens: int
) -> None:
    """Also where they are padded, and where they are cut. A short template, since a byte is a token here."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE, HunyuanVideoPipeline

    from arachnec.models.diffusers.common import shown_text
    from arachnec.models.diffusers.pretrained import pipeline_encoders

    monkeypatch.setitem(DEFAULT_PROMPT_TEMPLATE, "template", "say: {}!")
    monkeypatch.setitem(DEFAULT_PROMPT_TEMPLATE, "crop_start", 5)
    encoders: Any = pipeline_encoders(hunyuan, text_dtype=torch.float32)
    theirs: Any = object.__new__(HunyuanVideoPipeline)
    theirs.__dict__["_internal_dict"] = {}
    for name, number, kind in (("text", "", transformers.LlamaModel), ("pooled", "_2", transformers.CLIPTextModel)):
        weights = encoder_weights(hunyuan, name, encoders[name])
        assert weights is not None
        weights.fill(encoders[name])
        theirs.__dict__[f"text_encoder{number}"] = kind.from_pretrained(hunyuan / f"text_encoder{number}").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(hunyuan / f"tokenizer{number}")
        theirs.__dict__[f"tokenizer{number}"] = tokenizer
    given = {"prompt": caption, "max_sequence_length": tokens, "device": torch.device("cpu"), "dtype": torch.float32}
    embeddings, pooled, mask = theirs.encode_prompt(**given)
    clip = VideoClip("a", 1, 16, 16, tokens, caption, None, 0)
    ours = {name: encoders[name](encoders[name].load(clip, "cpu")) for name in ("text", "pooled")}
    torch.testing.assert_close(ours["text"], embeddings * mask[..., None])
    torch.testing.assert_close(ours["pooled"], pooled)
    assert torch.equal(shown_text(ours["text"]), mask.bool())
    with torch.device("meta"):
        planned = pipeline_encoders(hunyuan)
    assert planned["text"](planned["text"].load(clip, "meta")).shape == embeddings.shape
    assert planned["pooled"](planned["pooled"].load(clip, "meta")).shape == pooled.shape
