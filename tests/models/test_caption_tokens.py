"""Text tokens of captions: those that the model's own tokenizer and pipeline make of them."""

import json
from pathlib import Path

import pytest

from arachnec.data.clip import VideoClip, caption_tokens
from arachnec.data.manifest import read_manifest
from arachnec.ir.diagnostic import UserError
from arachnec.models.caption_tokens import CaptionCounter
from arachnec.models.file import load_model_file

pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WAN = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
COGVIDEOX = WAN | {"attention_head_dim": 16, "use_rotary_positional_embeddings": True, "max_text_seq_length": 20}
HUNYUAN = WAN | {"num_single_layers": 1, "rope_axes_dim": [4, 4, 4]}
FAMILIES = {
    "wan": ("WanPipeline", "WanTransformer3DModel", WAN),
    "cogvideox": ("CogVideoXPipeline", "CogVideoXTransformer3DModel", COGVIDEOX),
    "hunyuan_video": ("HunyuanVideoPipeline", "HunyuanVideoTransformer3DModel", HUNYUAN),
}


def folder_of(place: Path, family: str) -> Path:
    """A pipeline's folder without weights, whose tokenizer makes a token of each word, and one of the end."""
    pipeline, kind, config = FAMILIES[family]
    for part, name, content in (
        ("", "model_index.json", {"_class_name": pipeline}),
        ("transformer", "config.json", {"_class_name": kind, **config}),
    ):
        (place / part).mkdir(parents=True, exist_ok=True)
        (place / part / name).write_text(json.dumps(content))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "</s>": 1, "pad": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="pad", eos_token="</s>")
    fast.save_pretrained(place / "tokenizer")
    return place


def counter(folder: Path, family: str, more: str = "", *, refuse: bool = False) -> CaptionCounter:
    (folder / "model.py").write_text(
        f"from arachnec.models.diffusers import {family}\n"
        f"model = {family}.text_to_video({str(folder)!r}{more})\n"
        "build, sample, loss = model.build, model.sample, model.loss\n"
    )
    return CaptionCounter(load_model_file(folder / "model.py"), refuse)


def clip(*captions: str, counted: bool = True) -> VideoClip:
    return VideoClip(0, 5, 32, 32, 3, captions[0], captions=captions if len(captions) > 1 else (), counted=counted)


def test_a_folders_tokenizer_counts_and_not_bytes(tmp_path: Path) -> None:
    counting = counter(folder_of(tmp_path, "wan"), "wan")
    assert counting.clip(clip("a cat on a wall")).text_tokens == 6
    assert counting.clip(clip("a   cat &amp; a\ndog ")).text_tokens == 6, "as the pipeline tidies it"
    assert counting.clip(clip("")).text_tokens == 1
    assert counting.clip(clip("a cat", "a cat on a wall", "cat")).text_tokens == 6, "of several the longest"
    assert counting.clip(clip("a cat on a wall", counted=False)).text_tokens == 3, "what the manifest counted stays"
    assert not counting.notes


def test_cogvideox_sees_its_padding_so_every_caption_has_all_tokens(tmp_path: Path) -> None:
    counting = counter(folder_of(tmp_path, "cogvideox"), "cogvideox")
    assert [counting.clip(clip(caption)).text_tokens for caption in ("", "a cat", "a " * 60)] == [20, 20, 20]
    assert counting.cut == 1


def test_of_hunyuan_videos_template_no_token_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    monkeypatch.setitem(DEFAULT_PROMPT_TEMPLATE, "template", "say this: {}")
    monkeypatch.setitem(DEFAULT_PROMPT_TEMPLATE, "crop_start", 2)
    counting = counter(folder_of(tmp_path, "hunyuan_video"), "hunyuan_video")
    assert counting.clip(clip("a cat {on} a wall")).text_tokens == 6
    assert counting.clip(clip("a " * 300)).text_tokens == 256


def test_a_caption_that_is_too_long_is_cut_with_a_note_or_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "wan")
    (folder / "clips.jsonl").write_text(
        "".join(json.dumps({"frames": 5, "height": 32, "width": 32, "caption": "a " * n}) + "\n" for n in (3, 600, 520))
    )
    manifest = read_manifest(folder / "clips.jsonl")
    counting = counter(folder, "wan")
    assert [clip.text_tokens for clip in counting.manifest(manifest).clips] == [4, 512, 512]
    assert counting.notes == [
        'note: 2 captions of more than 512 text tokens are cut, the longest of 601; `long_captions = "refuse"` '
        "refuses them"
    ]
    assert counter(folder, "wan", ", text_length=9").clip(manifest.clips[1]).text_tokens == 9
    with pytest.raises(UserError, match="the caption of clip `1` has 601 text tokens, and the model takes 512"):
        counter(folder, "wan", refuse=True).manifest(manifest)


def test_without_a_tokenizer_bytes_are_counted_and_cut_at_the_models_length(tmp_path: Path) -> None:
    source = "from arachnec.models.diffusers import wan\nmodel = wan.text_to_video({})\n"
    source += "build, sample, loss = model.build, model.sample, model.loss\n"
    (tmp_path / "model.py").write_text(source.format("text_length=9"))
    counting = CaptionCounter(load_model_file(tmp_path / "model.py"))
    assert [counting.clip(clip(text)).text_tokens for text in ("a fée", "a long caption")] == [
        caption_tokens("a fée"),
        9,
    ]


def test_a_pipelines_folder_pads_as_its_pipeline_does(tmp_path: Path) -> None:
    from arachnec.models.diffusers import wan

    folder = folder_of(tmp_path, "wan")
    assert wan.text_to_video(str(folder)).text_length == 512
    assert wan.text_to_video(str(folder), text_length=64).text_length == 64
    assert wan.text_to_video(num_layers=1).text_length is None
