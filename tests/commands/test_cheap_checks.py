"""A path, a cluster, a pass or an option that is wrong is said before anything that takes seconds is imported."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import contextlib, io, json, sys
from arachnec.cli import run
answers = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(arguments)
    heavy = {"torch", "z3", "scipy", "diffusers", "matplotlib", "pyarrow"} & set(sys.modules)
    answers.append((code, said.getvalue(), sorted(heavy)))
print(json.dumps(answers))
"""
CLIPS = '{"id": "a", "frames": 9, "height": 64, "width": 96, "text_tokens": 4}\n'
MODEL = "import torch\n\ndef build(): ...\ndef sample(clip, generator): ...\ndef loss(prediction, target): ...\n"
COMPILE = ["compile", "model.py", "--data", "clips.jsonl", "--cluster", "2:cpu"]
COMPARE = ["compare", *COMPILE[1:]]
GENERATE = ["generate", "model.py", "--data", "clips.jsonl", "--cluster", "2:cpu", "-o", "out"]


def but(arguments: list[str], old: str, new: str) -> list[str]:
    return [new if word == old else word for word in arguments]


CASES = [
    (but(COMPILE, "model.py", "none.py"), "there is no model file"),
    (but(COMPILE, "clips.jsonl", "none.jsonl"), "none.jsonl"),
    (but(COMPILE, "2:cpu", "none.toml"), "none.toml"),
    (but(COMPILE, "2:cpu", "2:nosuch"), "nosuch"),
    ([*COMPILE, "--passes", "partitoin"], "partitoin"),
    ([*COMPILE, "--profile", "none.json"], "none.json"),
    ([*COMPILE, "--init", "none"], "none holds no weights"),
    ([*COMPILE, "--set", "nosuch=1"], "nosuch"),
    (but(COMPARE, "model.py", "none.py"), "there is no model file"),
    (but(COMPARE, "clips.jsonl", "none.jsonl"), "none.jsonl"),
    (but(GENERATE, "model.py", "none.py"), "there is no sampler file"),
    (but(GENERATE, "clips.jsonl", "none.jsonl"), "none.jsonl"),
    (["profile", "none.py", "--data", "clips.jsonl", "--cluster", "2:cpu", "-o", "p.json"], "no model file"),
    (["profile", "model.py", "--data", "none.jsonl", "--cluster", "2:cpu", "-o", "p.json"], "none.jsonl"),
    (["cache", "none.py", "--data", "clips.jsonl", "-o", "out"], "there is no model file"),
    (["cache", "model.py", "--data", "none.jsonl", "-o", "out"], "none.jsonl"),
    (["check", "none.cascade"], "none.cascade"),
    (["simulate", "none.cascade"], "none.cascade"),
    (["run", "none"], "none"),
    (["run", "build", "--init", "none"], "none holds no weights"),
    (["export", "build", "--checkpoint", "none", "-o", "out"], "Directory 'none' does not exist"),
    (["profile", "model.py", "--data", "clips.jsonl", "--cluster", "2:cpu", "-o", "none/p.json"], "none: no such file"),
]


def test_a_wrong_input_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "clips.jsonl").write_text(CLIPS)
    command = [sys.executable, "-c", SCRIPT, json.dumps([arguments for arguments, _ in CASES])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (arguments, message), (code, said, heavy) in zip(CASES, json.loads(done.stdout), strict=True):
        assert (code, heavy) == (2, []), (arguments, said)
        assert message in said, arguments
