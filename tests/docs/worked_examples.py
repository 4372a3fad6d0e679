"""The worked examples of the documentation, followed to the letter in a copy of the repository.

A line ```New file `path`:``` above a fenced block says that it is the whole of that file; a line ```In `path`:```,
that it is a ``diff`` of one that is there. ``sh`` blocks are commands.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
COPIED = ("arachnec", "docs", "examples", "tests", "pyproject.toml", "ir", "passes", "kernels", "backends")
BLOCK = re.compile(
    r"(?:^(?P<where>In|New file) `(?P<path>[^`]+)`:\n\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
COMMANDS = (
    'python() { "$WARM_PYTHON" "$@"; }\narachnec() { python -m arachnec "$@"; }\n'
    'pytest() { python -m pytest -W "ignore:Module already imported so cannot be rewritten" "$@"; }\n'
    "set -euo pipefail\n"
)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``path`` where the line above names a file."""

    kind: str
    path: str | None
    text: str


def blocks(page: Path) -> Iterator[Block]:
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match["kind"], match["path"], match["text"])


def changed(text: str, diff: str, where: str) -> str:
    """``text`` after a diff whose hunks, parted by ``@@`` lines, carry no line numbers."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = [line or " " for line in hunk.splitlines()]
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] != "+")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] != "-")
        if not hunk:
            continue
        assert text.count(before) == 1, f"{where} has these lines {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    return text


def scratch_copy(folder: Path) -> Path:
    """The repository's sources, as somebody who tries an example has them."""
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_dir():
            shutil.copytree(source, target)  # compiled files too: they fit as long as their source is unchanged
        else:
            shutil.copy(source, target)
    return folder


def follow(page: Path, folder: Path) -> None:
    """Write, change and run what the page says, from top to bottom. Fails at the first thing that does not work."""
    for block in blocks(page):
        if block.path is not None:
            target = folder / block.path
            if block.kind == "diff":
                target.write_text(changed(target.read_text(encoding="utf-8"), block.text, block.path), encoding="utf-8")
            else:
                assert not target.exists(), f"{block.path} is there already"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
        elif block.kind == "sh":
            run(block.text, folder)


def run(commands: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    environment["WARM_PYTHON"] = warm_python(inside=False)  # nothing of ours: the copy has its own
    done = subprocess.run(
        ["bash", "-c", COMMANDS + commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
