"""Every file of the newest checkpoint damaged in every way, and the run resumed: from the one before, losses unchanged.

Two gloo ranks wrote them, one or two read them. A shard whose commit was given the hash of what it is now cannot be
told from a whole one: then one message and exit code 2, or the losses of its values.

    python -m benchmarks.trust.checkpoint_damage -o benchmarks/results/checkpoint_damage.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arachnec.checkpoint.folder import COMMIT, committed
from benchmarks.trust.resumed_options import CASES, EVERY, MODEL, compiled, demanded, ended, rows, run, seen
from tests.commands.binary_inputs import damaged_bytes

DONE, MORE = 2 * EVERY, 2  # steps before the damage, and after it
WAYS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "a bit flipped": lambda data, rng: _flipped(data, rng.randrange(len(data)), rng),
    "cut short": lambda data, rng: data[: rng.randrange(1, len(data))],
    "emptied": lambda data, rng: b"",
    "deleted": lambda data, rng: None,
    "overwritten": lambda data, rng: rng.randbytes(len(data)),
    "longer": lambda data, rng: data + b"\0",
}


def _flipped(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def hashed_again(folder: Path, file: str) -> None:
    """The commit says of a file what it is now."""
    commit = json.loads((folder / COMMIT).read_text())
    data = (folder / file).read_bytes()
    for record in commit["files"]:
        if record["name"] == file:
            record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / COMMIT).write_text(json.dumps(commit | {"digest": ""}))


def damages(newest: Path, rng: random.Random) -> dict[str, Callable[[Path], object]]:
    """What is done to a copy of the checkpoints, by its name."""

    def one(file: str, way: str) -> Callable[[Path], None]:
        def damage(kept: Path) -> None:
            path = kept / newest.name / file
            data = WAYS[way](path.read_bytes(), rng)
            path.unlink() if data is None else path.write_bytes(data)

        return damage

    def header(file: str) -> Callable[[Path], None]:
        def damage(kept: Path) -> None:
            path = kept / newest.name / file
            path.write_bytes(damaged_bytes(file, path.read_bytes(), rng))
            hashed_again(path.parent, file)

        return damage

    files = sorted(path.name for path in newest.iterdir())
    listed: dict[str, Callable[[Path], object]] = {f"{file} {way}": one(file, way) for file in files for way in WAYS}
    listed |= {f"{file} with its hash, {n}": header(file) for file in files if file != COMMIT for n in range(3)}
    listed["nothing"] = lambda kept: None
    listed["a draft of a commit beside it"] = lambda kept: (kept / newest.name / f"{COMMIT}.draft").write_bytes(b"{")
    listed["no commit, as after a kill"] = one(COMMIT, "deleted")
    return listed


def judged(folder: Path, kept: str, name: str, ranks: int, right: dict[int, float]) -> dict[str, Any]:
    log = folder / f"{kept}.jsonl"
    code, said = ended(run(folder, log.name, kept, "--more", str(MORE), "--resume", "--ranks", str(ranks)))
    took = [(row["step"], row["loss"]) for row in seen(log)]
    apart = max((abs(loss - right[step]) / abs(right[step]) for step, loss in took), default=None)
    first = min((step for step, _ in took), default=None)
    sound = name in ("nothing", "a draft of a commit beside it")
    if "with its hash" in name:
        wrong = code not in (0, 2)
    else:
        wrong = code != 0 or first != (DONE if sound else DONE - EVERY) or apart is None or apart > 1e-6
    wrong = wrong or "Traceback" in said
    told = next((line for line in said.splitlines() if line.startswith("error")), "")
    return {"damage": name, "code": code, "from": first, "apart": apart, "told": told[:160], "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    told: list[dict[str, Any]] = []
    if options.output and options.output.exists():  # goes on where it was stopped
        told = json.loads(options.output.read_text())["damages"]
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="arachnec-damage-") as place:
        folder = Path(place)
        (folder / "model.py").write_text(MODEL)
        (folder / "train.toml").write_text("")
        (folder / "clips.jsonl").write_text(rows("clip", 9, True))
        (folder / "held.jsonl").write_text(rows("held", 3, False))
        compiled(folder, CASES["plain"], "build")
        demanded(run(folder, "right.jsonl", "right", "--steps", str(DONE + MORE)))
        right = {row["step"]: row["loss"] for row in seen(folder / "right.jsonl")}
        demanded(run(folder, "first.jsonl", "kept", "--steps", str(DONE)))
        listed = damages(committed(folder / "kept")[0], rng)
        for number, (name, make) in enumerate(listed.items()):
            if name in {row["damage"] for row in told}:
                continue
            copy = folder / f"kept-{number}"
            shutil.copytree(folder / "kept", copy)
            make(copy)
            told.append(judged(folder, copy.name, name, 1 + number % 2, right))
            print(json.dumps(told[-1]), flush=True)
            wrong = sum(row["wrong"] for row in told)
            result = {"damages": told, "made": len(told), "of": len(listed), "wrong": wrong, "seed": options.seed}
            if options.output:
                options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
