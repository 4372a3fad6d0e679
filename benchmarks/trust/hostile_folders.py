"""Damaged folders to the commands that only look at some: only the product's own errors, soon, and no code of theirs.

Executables that train, that sample and that are sparse, one of them run, and the checkpoints of that run. Any file of
one is cut, filled with other values, tokens and bytes, exchanged for another's, or made a link, a pipe or a folder;
files are taken away and added. Half of the time the fingerprint is made to fit, as somebody would who knows of it.
Each input runs in a fork, judged as ``input_fuzz`` judges. Every Python file of a folder that is only looked at says
so when it runs: that is wrong, too.

    python -m benchmarks.trust.hostile_folders --inputs 1000 --folders F -o benchmarks/results/hostile_folders.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import resource
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from arachnec import cli
from arachnec.checkpoint.folder import COMMIT, committed
from arachnec.executable.folder import CLIPS, HEADER, MEASURED, PROGRAM, digest_of, read_executable
from arachnec.executable.folder import MODEL as MODEL_FILE
from arachnec.export.model_values import MASTER, trained_values
from arachnec.ir.diagnostic import UserError
from benchmarks.trust.input_fuzz import damaged, judge_all, other_tokens, other_values
from tests.commands.binary_inputs import damaged_bytes
from tests.commands.small_model import MODEL

RAN = "code of the folder ran"
LOOKS: tuple[tuple[str, ...], ...] = (
    ("show",),
    ("show", "--html", "page.html", "--svg", "drawn.svg", "--trace", "events.json"),
    ("check",),
    ("simulate", "--svg", "drawn.svg", "--trace", "events.json"),
    ("simulate", "--json"),
    ("explain", "--budget", "1ms"),
    ("explain", "--no-what-if"),
)
DEEP = 100_000
NAMES = ("a" * 255, "\x1b[2J", "[bold]", "..x", "-o", "torch.py", "msgspec.py", "sitecustomize.py", "caf\udce9")
NAMED = ("", ".", "..", "/dev/zero", "pipe", "\x00", "a" * 300, "../x", "model.py", "x.py", "\x1b[2J.py")
NOT_UTF8 = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\x1b[2J", b"\xef\xbb\xbf")
NUMBERS = ("NaN", "Infinity", "-1e999", "1e308", "-1", "9" * 5000, "1" + "0" * 18, "5e-324")
# What reading JSON comes to that an earlier damage made something else of.
OTHERWISE = (ValueError, OSError, AttributeError, TypeError, LookupError, RecursionError)
Run = Callable[[], int]


def executables(root: Path) -> None:
    """Make those that are not there: ``train``, which is run, ``sampling`` and ``sparse``; and ``checkpoints``."""
    from tests.commands.test_requests import REQUESTS, SAMPLER

    root.mkdir(parents=True, exist_ok=True)
    (root / "small.py").write_text(MODEL)
    (root / "sampler.py").write_text(SAMPLER)
    rows = [{"id": name, "frames": n, "height": 64, "width": 64, "text_tokens": 0} for name, n in (("a", 8), ("b", 4))]
    for name, lines in (("clips", rows), ("requests", list(REQUESTS))):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    training = ("small.py", "--data", root / "clips.jsonl")
    wanted: dict[str, tuple[object, ...]] = {
        "train": training,
        "sparse": (*training, "--passes", "sparse"),
        "sampling": ("sampler.py", "--data", root / "requests.jsonl", "--switch", "fixed=3"),
    }
    for name, (source, *options) in wanted.items():
        if not (root / name / HEADER).is_file():
            _demand("compile", root / str(source), *options, "--cluster", "2:cpu", "-o", root / name)
    if not committed(root / "checkpoints"):
        _demand("run", root / "train", "--steps", 2, "--every", 1, "--checkpoint", root / "checkpoints")


def demand_whole(root: Path) -> None:
    """What is damaged is right as it is; and every fork finds imported what these need."""
    for words, kind in itertools.product(LOOKS, ("train", "sampling", "sparse")):
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
            if _looked(Path(place), (words[0], str(root / kind), *words[1:])):
                raise SystemExit(f"{words[0]} refuses {root / kind}, which is whole")
    with contextlib.redirect_stderr(io.StringIO()):
        _checkpoint(root / "checkpoints", root / "train")


def _demand(*words: object) -> None:
    if code := cli.run([str(word) for word in words]):
        raise SystemExit(code)


def one_input(root: Path, place: Path, rng: random.Random) -> tuple[str, Run]:
    """Write a damaged folder below ``place``; what was done, and what is to be run on it."""
    kind = rng.choice(("train", "sampling", "sparse", "checkpoints"))
    shutil.copytree(root / kind, place / kind)
    folder = place / kind
    if kind == "checkpoints":
        done = damage(folder, [root / "checkpoints"], rng)
        return done, lambda: _checkpoint(folder, root / "train")
    others = [root / other for other in ("train", "sampling", "sparse") if other != kind]
    done = "; ".join(damage(folder, others, rng) for _ in range(rng.choice((1, 1, 2))))
    if rng.random() < 0.5:
        refit(folder)
    tell_code(folder)
    words = rng.choice(LOOKS)
    return f"{kind}: {done}: {' '.join(words)}", lambda: _looked(place, (words[0], str(folder), *words[1:]))


def _looked(place: Path, words: tuple[str, ...]) -> int:
    with contextlib.chdir(place):
        code = cli.run(words)
    return 1 if (place / "ran").exists() else code


def _checkpoint(folder: Path, executable: Path) -> int:
    """What `export` and a run that resumes read first, and `convert-checkpoint`."""
    from arachnec.commands.program_file import read_program
    from arachnec.ir.diagnostic import render_all

    try:
        read_program(executable)
        values = trained_values(folder, read_executable(executable).digests[MODEL_FILE], executable, averages=False)
        for name, stored in values.stored.items():
            if name.startswith(f"{MASTER}/"):
                values.parameter(name.partition("/")[2], torch.Size((stored.size,)))
    except UserError as error:
        print(render_all(error.diagnostics))
    return cli.run(("convert-checkpoint", str(executable), str(folder)))


def damage(folder: Path, others: list[Path], rng: random.Random) -> str:
    """Change one file of a folder in one way; says which and how."""
    files = sorted(path for path in folder.rglob("*") if _own(path) and path.suffix not in (".png", ".svg", ".html"))
    file, way = rng.choice(files), rng.choice(WAYS)
    way(file, others, rng)
    return f"{way.__name__[1:]} {file.relative_to(folder)}"


def _own(path: Path) -> bool:
    """Whether it is a file of the folder: what a link leads to is neither read here nor written."""
    return path.is_file() and not path.is_symlink()


def _bytes_cut(file: Path, others: list[Path], rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data) + 1)])


def _bytes_wrong(file: Path, others: list[Path], rng: random.Random) -> None:
    file.write_bytes(damaged_bytes(file.name, file.read_bytes(), rng))


def _not_utf8(file: Path, others: list[Path], rng: random.Random) -> None:
    data = file.read_bytes()
    at = rng.randrange(len(data) + 1)
    file.write_bytes(data[:at] + rng.choice(NOT_UTF8) + data[at:])


def _text_wrong(file: Path, others: list[Path], rng: random.Random) -> None:
    file.write_bytes(damaged(file.read_bytes().decode(errors="replace"), rng))


def _values_other(file: Path, others: list[Path], rng: random.Random) -> None:
    """In JSON, other types; in IR, other tokens."""
    with contextlib.suppress(*OTHERWISE):  # of what is neither
        file.write_bytes((other_tokens if file.suffix == ".cascade" else other_values)(file.read_text(), rng))


def _number_other(file: Path, others: list[Path], rng: random.Random) -> None:
    text = file.read_bytes().decode(errors="replace")
    places = [at for at, letter in enumerate(text) if letter.isdigit() and not text[at - 1].isalnum()]
    if places:
        at = rng.choice(places)
        end = next((n for n in range(at, len(text)) if text[n] not in "0123456789.e-"), len(text))
        file.write_text(text[:at] + rng.choice(NUMBERS) + text[end:])


def _deep(file: Path, others: list[Path], rng: random.Random) -> None:
    text = file.read_bytes().decode(errors="replace")
    at = rng.choice([0, *(n + 1 for n, letter in enumerate(text) if letter in ":=[(")])
    opened = rng.choice(("[", '{"a":', "(", "-", "{"))
    file.write_text(text[:at] + opened * DEEP + text[at:])


def _long_line(file: Path, others: list[Path], rng: random.Random) -> None:
    data = file.read_bytes()
    at = rng.randrange(len(data) + 1)
    file.write_bytes(data[:at] + rng.choice((b"a", b" ", b"\n", b'"', b"0", b"/")) * 2_000_000 + data[at:])


def _gone(file: Path, others: list[Path], rng: random.Random) -> None:
    file.unlink()


def _empty(file: Path, others: list[Path], rng: random.Random) -> None:
    file.write_bytes(b"")


def _a_folder(file: Path, others: list[Path], rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _a_pipe(file: Path, others: list[Path], rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _a_link(file: Path, others: list[Path], rng: random.Random) -> None:
    file.unlink()
    places = ("/dev/zero", "/dev/full", "/etc/hostname", "nowhere", file.name, ".", "/proc/self/mem")
    file.symlink_to(rng.choice(places))


def _of_another(file: Path, others: list[Path], rng: random.Random) -> None:
    from_other = [path for path in rng.choice(others).rglob("*") if path.is_file()]
    alike = [path for path in from_other if path.name == file.name] if rng.random() < 0.6 else []
    shutil.copyfile(rng.choice(sorted(alike or from_other)), file)


def _surplus(file: Path, others: list[Path], rng: random.Random) -> None:
    """Files that nobody asked for; modules that a library may look for."""
    (file.parent / rng.choice(NAMES)).write_bytes(b"")
    for stray in (PROGRAM, MEASURED, "measured.cascade", CLIPS, COMMIT):
        if not (file.parent / stray).exists() and rng.random() < 0.3:
            shutil.copyfile(file, file.parent / stray)


def _header_tampered(file: Path, others: list[Path], rng: random.Random) -> None:
    """Names of files, in whatever names some."""
    header = next((path for path in (file.parent / HEADER, file.parent / COMMIT) if _own(path)), None)
    with contextlib.suppress(*OTHERWISE):
        tree = json.loads(header.read_text()) if header else {}
        name = rng.choice(NAMED)
        if "files" in tree:
            os.mkfifo(file.parent / "pipe")
            tree["files"] += [{"name": name, "bytes": 0, "sha256": digest_of(b"")}]
            tree.pop("digest")
        else:
            option = rng.choice(("profile", "orders", "layers", "file"))
            quoted = rng.choice((json.dumps(name), name, '"\\q"', '"\x01"', '"\\ud800"', '"a', "{", "}"))
            step = rng.choice(("annotate", "schedule-pipeline", "stages-dapple", "sparsify", "nothing"))
            key, value = rng.choice((
                ("load", [name]), ("load", ["a.py"]), ("modules", [name]), ("modules", ["a.py"]), ("origin", name),
                ("pipeline", f"{step}{{{option}={quoted}}},{tree['pipeline']}"),
                ("pipeline", ",".join([tree["pipeline"]] * 200)), ("pipeline", "lower" + "{" * 1000),
                ("versions", {name: name}), ("fingerprint", {**tree["fingerprint"], name: name}),
            ))  # fmt: skip
            (file.parent / "a.py").write_text("")
            tree[key] = value
        header.write_text(json.dumps(tree)) if header else None


WAYS = (
    _bytes_cut, _bytes_wrong, _not_utf8, _text_wrong, _values_other, _values_other, _values_other, _number_other,
    _number_other, _deep, _long_line, _gone, _empty, _a_folder, _a_pipe, _a_link, _of_another, _surplus,
    _header_tampered, _header_tampered,
)  # fmt: skip


def refit(folder: Path) -> None:
    """The fingerprint of the files as they are now."""
    if not _own(folder / HEADER):
        return
    with contextlib.suppress(*OTHERWISE):
        header = json.loads((folder / HEADER).read_text())
        for name in {**header["fingerprint"], **dict.fromkeys(header["load"] + header["modules"])}:
            if _own(folder / name):
                header["fingerprint"][name] = digest_of((folder / name).read_bytes())
        (folder / HEADER).write_text(json.dumps(header))


def tell_code(folder: Path) -> None:
    """Every Python file of the folder leaves a mark beside it when it runs."""
    mark = f"open({str(folder.parent / 'ran')!r}, 'w').close()\n"
    known = {}
    for file in folder.glob("*.py"):
        if _own(file):
            before = digest_of(file.read_bytes())
            file.write_text(mark)
            known[before] = digest_of(file.read_bytes())
    if not _own(folder / HEADER):
        return
    with contextlib.suppress(*OTHERWISE):
        text = (folder / HEADER).read_text()
        for before, after in known.items():
            text = text.replace(before, after)
        (folder / HEADER).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", type=Path, required=True, help="where the whole ones are, or are made")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    root = options.folders.absolute()
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))
    executables(root)
    demand_whole(root)

    def one(number: int, place: Path, rng: random.Random) -> tuple[str, dict[str, str], Run]:
        done, run = one_input(root, place, rng)
        return done.split(":")[0] if ":" in done else "checkpoints", {"what": done}, run

    judge_all(one, range(options.first, options.inputs), options.seed, options.output, Counter(), [])


if __name__ == "__main__":
    main()
