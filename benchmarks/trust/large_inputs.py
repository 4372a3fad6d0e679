"""Large input to every reader: files of 1 to 256 MiB that are one line, many, nested, or sound but for one part.

Each runs in a process of its own, as in `input_fuzz.py`, under the same limits: only the product's own errors, at most
20 of them and 10 kB, 10 s of processor time, 1 GiB. Files are removed as soon as they are judged.

    python -m benchmarks.trust.large_inputs --mib 1,16,64,256 -o benchmarks/results/large_inputs.json
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.trust.input_fuzz import _read, judged
from tests.commands.binary_inputs import BINARY
from tests.commands.test_hostile_input import READERS, SEEDS

MIB = 2**20
PLAIN = {
    "one line": b"a",
    "empty lines": b"\n",
    "lines": b"x = 1\n",
    "nested": b"[",
    "objects": b'{"a":',
    "an open string": b'"aaaaaaaaaaaaaaa',
    "digits": b"9",
    "a list": b"1,",
    "zeros": b"\0",
    "no text": b"\xff\xfe\x80",
}


def repeated(piece: bytes, size: int) -> bytes:
    return (piece * (size // len(piece) + 1))[:size]


def sound_but_for_one(seed: bytes, size: int) -> dict[str, Callable[[], bytes]]:
    """A right input with one part of it long: a number, a text, a row, a gap, what follows it."""
    shapes: dict[str, Callable[[], bytes]] = {}

    def insert(name: str, at: int, piece: bytes) -> None:
        shapes[name] = lambda: seed[:at] + repeated(piece, size) + seed[at:]

    if number := re.search(rb"\d", seed):
        insert("a long number", number.start(), b"9")
    for count, text in enumerate(list(re.finditer(rb'"\w', seed))[:6:2]):
        insert(f"a long text {count}", text.end(), b"b")
    if bracket := re.search(rb"[\[({]", seed):
        insert("a deep value", bracket.end(), bracket[0])
    rows = seed.splitlines(keepends=True)
    if len(rows) > 1:
        middle = len(b"".join(rows[: len(rows) // 2]))
        insert("a row again and again", middle, rows[len(rows) // 2])
        insert("the last row again and again", len(seed), rows[-1])
    insert("blanks", len(seed) // 2, b" ")
    insert("the whole again and again", len(seed), seed)
    return shapes


def seed_of(name: str) -> bytes:
    if name in SEEDS:
        return SEEDS[name].encode()
    with tempfile.TemporaryDirectory() as folder:
        BINARY[name][0](Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def told_of(name: str, shape: str, file: Path, mib: int) -> dict[str, Any]:
    """What a reader makes of a file, by its own name for it."""
    read = READERS[name] if name in READERS else BINARY[name][1]
    with tempfile.TemporaryDirectory(prefix="arachnec-large-") as folder:
        path = Path(folder) / name
        path.hardlink_to(file)
        begun = time.monotonic()
        why = judged(lambda: _read(read, path))
    return {"reader": name, "shape": shape, "mib": mib, "wall_s": round(time.monotonic() - begun, 1), "why": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", default="1,16,64,256")
    parser.add_argument("--readers", help="by commas; all where it is left out")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.mib.split(",")]
    names = options.readers.split(",") if options.readers else [*READERS, *BINARY]
    told: list[dict[str, Any]] = []
    for mib in sizes:
        inputs = [(shape, names, partial(repeated, piece, mib * MIB)) for shape, piece in PLAIN.items()]
        for name in names:
            inputs += [(shape, [name], write) for shape, write in sound_but_for_one(seed_of(name), mib * MIB).items()]
        for shape, readers, write in inputs:
            with tempfile.NamedTemporaryFile(prefix="arachnec-large-") as file:
                file.write(write())
                file.flush()
                for name in readers:
                    told.append(told_of(name, shape, Path(file.name), mib))
                    if told[-1]["why"]:
                        print(json.dumps(told[-1]), flush=True)
        wrong = [one for one in told if one["why"]]
        slowest = max((one["wall_s"] for one in told if one["mib"] == mib), default=0)
        print(json.dumps({"mib": mib, "inputs": len(told), "wrong": len(wrong), "slowest_s": slowest}), flush=True)
        if options.output:
            result = {"sizes_mib": sizes, "inputs": len(told), "slowest_s": slowest, "wrong": wrong}
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
