"""Wrong input of every kind: one message that says what to do, exit code 2, and nothing lost."""

from __future__ import annotations

import json
import logging
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from arachnec.cli import COMMANDS, run
from tests.commands.small_model import MODEL

CLIP = {"frames": 9, "height": 32, "width": 48, "text_tokens": 8}
CLIPS = "".join(json.dumps(CLIP | {"frames": frames}) + "\n" for frames in (9, 5, 1))
COMPILE = ("compile", "model.py", "--data", "clips.jsonl", "--cluster", "2:cpu")


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line in a folder with ``model.py`` and ``clips.jsonl`` and gives the one message it must print."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("clips.jsonl").write_text(CLIPS)
    Path("binary").write_bytes(bytes(range(256)) * 9)
    Path("folder").mkdir()
    Path("folder/kept").write_text("kept")

    def command(*arguments: str) -> str:
        before = snapshot(tmp_path)
        assert run(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert sum(line.startswith(("error: ", "Error: ")) for line in said.splitlines()) == 1, said
        assert "  help: " in said or "Usage: " in said, f"no remedy: {said}"
        assert max(map(len, said.splitlines())) < 700, "a message a person can read"
        assert snapshot(tmp_path) == before, "what was there stays, and nothing half made appears"
        return said

    return command


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def instead(function: str, body: str) -> str:
    """The model file with another function of that name."""
    return f"{MODEL}\n{textwrap.dedent(body)}".replace(f"def {function}", f"def old_{function}", 1)


CLUSTERS = {
    "4:": "neither a cluster file nor a short form",
    "": "neither",
    "99999x99999:cpu": "more than",
    "folder": "neither",
    "binary": "not TOML",
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_that_is_none(cluster: str, refused: Callable[..., str]) -> None:
    assert CLUSTERS[cluster] in refused(*COMPILE[:-1], cluster)


HELD_BACK = {"path": {"caption": "a cat"}, "caption": {"path": "cat.mp4"}}


@pytest.mark.parametrize("key", HELD_BACK)
def test_held_back_clips_without_what_those_of_training_have(key: str, refused: Callable[..., str]) -> None:
    Path("cat.mp4").touch()
    trained = CLIP | {"caption": "a cat", "path": "cat.mp4"}
    Path("clips.jsonl").write_text(json.dumps(trained) + "\n")
    rows = (trained | {"id": "whole"}, CLIP | {"id": "short"} | HELD_BACK[key])
    Path("held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refused(*COMPILE, "--batch", "all", "--set", "validation.data=held.jsonl")
    assert f"of held.jsonl has no `{key}`, and the clips of training have" in said
    assert "held-back clip `" in said and "short` of" in said


ROWS = {
    json.dumps(CLIP | {"frames": "9"}): "an integer",
    json.dumps(CLIP | {"frames": True}): "an integer",
    json.dumps(CLIP | {"frames": 10**40}): "at most",
    json.dumps(CLIP | {"clips": 10**12}): "at most",
    json.dumps(CLIP | {"path": "a" * 5000}): "a file that is there",
    json.dumps(CLIP | {"path": "a\0b"}): "a file that is there",
    json.dumps(CLIP | {"path": "folder"}): "a file that is there",
    json.dumps(CLIP | {"caption": 3}): "a string",
    json.dumps({"path": "binary", "text_tokens": 8}): "cannot be decoded",
    '{"caption": "\\ud800", "frames": 9, "height": 32, "width": 32}': "UTF-8",
    '{"frames": ' + "9" * 5000 + "}": "not JSON",
    "[" * 100000: "not JSON",
    json.dumps(CLIP | {"height": 3, "width": 3}): "no tokens",
}


@pytest.mark.parametrize("text", ROWS, ids=range(len(ROWS)))
def test_a_manifest_with_a_mistake(text: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "clips.jsonl").write_text(text)
    assert ROWS[text] in refused(*COMPILE)


@pytest.mark.parametrize("text", ["frames,frames,height,width\n9,9,3,3\n", "frames,height\n9\n", 'caption\n"abc\n'])
def test_a_csv_with_a_mistake(text: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "clips.csv").write_text(text)
    assert "clips.csv" in refused("compile", "model.py", "--data", "clips.csv", "--cluster", "2:cpu")


MODELS = {
    "def build(:\n": "SyntaxError",
    "x = 1\0\n": "SyntaxError",
    "import nothing_of_this_name\n": "install that package",
    "import sys\nsys.exit(3)\n": "SystemExit",
    "": "no `build`",
    MODEL.replace("def sample", "def smple"): "no `sample`",
    MODEL.replace("def loss", "def los"): "no `loss`",
    instead("build", "build = 3"): "cannot be called",
    instead("build", "def build(x): return Net()"): "cannot be called",
    instead("build", "def build(): pass"): "`build` returned NoneType",
    instead("build", "def build(): return Net"): "`build` returned the class Net",
    instead("build", "def build(): yield Net()"): "`build` returned generator",
    instead("build", "def build(): return Net().requires_grad_(False)"): "no parameter trains",
    instead("build", "def build(): raise SystemExit(3)"): "SystemExit",
    instead("build", 'def build(): raise ValueError("two\\nlines")'): "two lines",
    instead("sample", "def sample(clip): pass"): "cannot be called",
    instead("sample", "def sample(clip, generator): pass"): "NoneType, not a pair",
    instead("sample", "def sample(clip, generator): return [1], torch.ones(1)"): "in place of keyword arguments",
    instead("sample", 'def sample(clip, generator): return {"x": torch.ones(1, 4, 8)}, None'): "target tensor",
    instead("sample", 'def sample(clip, generator): raise KeyError("it")'): "raised KeyError: 'it' in sample()",
    instead("sample", 'def sample(clip, generator): return {"y": torch.ones(1, 4, 8)}, torch.ones(1)'): "argument 'y'",
    instead("sample", 'def sample(clip, generator): return {"x": torch.ones(1, 4, 8)}, torch.ones(1)'): "grows",
    MODEL.replace("forward(self, x):\n        for", "forward(self, x, more):\n        for"): "argument: 'more'",
    MODEL.replace("        for block", "        assert x.shape[1] == 3\n        for block"): "AssertionError",
    MODEL.replace("return x + F", "return F.dropout(x, 0.5) + F"): "at random",
    MODEL.replace("range(2)", "range(0)"): "parameter",
    f"{MODEL}\ndef encoders(): return 3\n": "`encoders` returned int",
    f"{MODEL}\ndef encoders(): return {{'vae': nn.Linear(2, 2)}}\n": "without `load`",
    f"{MODEL}\ndef encoders(): return {{'a b': nn.Linear(2, 2)}}\n": "names are words",
}


@pytest.mark.parametrize("text", MODELS, ids=range(len(MODELS)))
def test_a_model_file_with_a_mistake(text: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(text)
    assert MODELS[text] in refused(*COMPILE, "-o", "build")


def test_shapes_that_do_not_fit_are_told_once(refused: Callable[..., str], tmp_path: Path) -> None:
    """Torch logs a traceback, too, where a fake tensor's operator refuses."""
    text = instead("sample", "def sample(clip, generator): return torch.ones(2, 3) @ torch.ones(2, 3)")
    (tmp_path / "model.py").write_text(text)
    records: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = records.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        assert "same reduction dim" in refused(*COMPILE, "-o", "build")
    finally:
        log.removeHandler(handler)
    assert records == []


@pytest.mark.parametrize("model", ["none.py", "folder", "binary", "clips.jsonl"])
def test_a_model_that_is_no_python_file(model: str, refused: Callable[..., str]) -> None:
    assert "no model file" in refused("compile", model, *COMPILE[2:])


OPTIONS = {
    ("--passes", "nope"): "no pass `nope`",
    ("--passes", ""): "not a pipeline",
    ("--passes", "partition,annotate"): "needs a lowered one",
    ("--passes", "default,partition"): "needs a traced module",
    ("--profile", "none.json"): "neither a profile file nor",
    ("--profile", "binary"): "not a profile",
    ("--batch", "0"): "neither a number of clips, from 1 on, nor `all`",
    ("--lr", "nan"): "learning rate",
    ("--seed", "9" * 30): "seed",
    ("--run",): "needs a folder",
    ("--run", "-o", "build", "--steps", "0"): "not in the range",
    ("-o", "clips.jsonl"): "is a file",
    ("-o", "clips.jsonl/x"): "not a directory",
    ("--load", "none.py"): "there is no file",
    ("--load", "binary"): "cannot be loaded",
    ("--print-ir-after", "nope"): "no pass `nope`",
    ("--dump-ir", "binary"): "is a file",
    ("--clsuter", "2:cpu"): "did you mean",
}


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_an_option_of_compile_that_cannot_be(options: tuple[str, ...], refused: Callable[..., str]) -> None:
    assert OPTIONS[options].lower() in refused(*COMPILE, *options).lower()


@pytest.mark.parametrize("passes", ["place", "schedule-z3", "partition", "schedule-z3,place,lower,check", "nope"])
def test_a_pipeline_that_plan_cannot_use(passes: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"tasks": [{"name": "a", "stages": [{"stage": "dit", "ms": {"1": 5}}]}]}')
    refused("plan", "table.json", "--cluster", "4:cpu", "--passes", passes)


@pytest.mark.parametrize(
    ("pipelines", "reason"), [("", "pipeline"), ("default,nope", "`nope`"), ("partition", "gives a partitioned module")]
)
def test_pipelines_that_cannot_be_compared(pipelines: str, reason: str, refused: Callable[..., str]) -> None:
    assert reason in refused("compare", *COMPILE[1:], "--pipelines", pipelines)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    (folder / "model.py").write_text(MODEL)
    (folder / "clips.jsonl").write_text(CLIPS)
    arguments = ("compile", str(folder / "model.py"), "--data", str(folder / "clips.jsonl"), "--cluster", "2:cpu")
    assert run([*arguments, "-o", str(folder / "build")]) == 0
    return folder / "build"


@pytest.mark.parametrize("command", ["check", "simulate", "show", "run", "opt", "bisect"])
@pytest.mark.parametrize("path", ["none", "folder", "binary"])
def test_a_program_that_is_none(command: str, path: str, refused: Callable[..., str]) -> None:
    refused(command, path, *(("--passes", "check") if command in ("opt", "bisect") else ()))


EDITS = {
    ("weight = ", "weight = 3"): "weight",
    ("weight = ", "weigth = "): "weight",
    (" ms", " GiB"): "ms",
    ("backward %0", "forward %0"): "%0",
    ("ranks = [0]", "ranks = [7]"): "rank",
}


@pytest.mark.parametrize("edit", EDITS, ids=" to ".join)
def test_a_program_edited_so_that_a_rule_breaks(
    edit: tuple[str, str], built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (built / "program.cascade").read_text()
    assert edit[0] in text
    file = tmp_path / "edited.cascade"
    file.write_text(text.replace(*edit, 1))
    for command in ("check", "simulate"):
        assert run([command, str(file)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert EDITS[edit] in said
        assert str(file) in said


RUN_OPTIONS = (
    ("--ranks", "0"),
    ("--ranks", "3"),
    ("--steps", "0"),
    ("--resume",),
    ("--every", "2"),
    ("--lr", "nan"),
    ("--ema", "2"),
    ("--dtype", "int4"),
    ("--report", "folder"),
    ("--report", "binary/x"),
    ("--save-gradients", "folder"),
    ("--save-gradients", "binary/x"),
    ("--checkpoint", "binary"),
    ("--checkpoint", "binary/x"),
)


@pytest.mark.parametrize("options", RUN_OPTIONS, ids=" ".join)
def test_an_option_of_run_that_cannot_be(
    options: tuple[str, ...], built: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    shutil.copytree(built, tmp_path / "build")
    said = refused("run", "build", *options)
    assert options[0] in said or options[-1].split("/")[0] in said


def test_a_sampler_file_is_profiled_as_it_is_built(refused: Callable[..., str]) -> None:
    Path("sampler.py").write_text("def models():\n    return {}\n\n\ndef scheduler():\n    return None\n")
    said = refused(
        "profile", "sampler.py", "--data", "clips.jsonl", "--cluster", "1:cpu", "-o", "p.json", "--dtype", "bf16"
    )
    assert "leave --dtype out" in said


@pytest.mark.parametrize("devices", [0, 1])
def test_gpus_to_profile_that_this_machine_does_not_have(
    devices: int, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    said = refused("profile", "model.py", "--data", "clips.jsonl", "--cluster", "2:h100", "-o", "profile.json")
    assert f"this machine: {devices}; needed are 2 x h100-80g" in said


@pytest.mark.parametrize(
    "command", [("simulate", "--svg"), ("simulate", "--trace"), ("show", "--svg"), ("opt", "--passes", "check", "-o")]
)
@pytest.mark.parametrize("place", ["folder", "binary/x", "none/x"])
def test_an_output_that_cannot_be_written(
    command: tuple[str, ...], place: str, built: Path, refused: Callable[..., str]
) -> None:
    refused(command[0], str(built / "program.cascade"), *command[1:], place)


def test_a_failed_compile_leaves_the_old_executable(built: Path, refused: Callable[..., str], tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "build")
    (tmp_path / "cluster.toml").write_text('gpus = 2\ndevice = "cpu"\nmemory = "0.000001 GiB"')
    refused(*COMPILE[:-1], "cluster.toml", "-o", "build")
    assert run(["check", "build"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_takes_an_option_it_does_not_know(command: str, refused: Callable[..., str]) -> None:
    assert "--no-such-option" in refused(command, "--no-such-option")


def test_a_training_file_that_is_none(refused: Callable[..., str]) -> None:
    assert "no training file" in refused(*COMPILE, "--train", "none.toml")
    assert "not TOML" in refused(*COMPILE, "--train", "binary")
    assert "no training file" in refused(*COMPILE, "--train", "folder")
    assert "did you mean `sampling`?" in refused(*COMPILE, "--set", "timesteps.sampler=uniform")
