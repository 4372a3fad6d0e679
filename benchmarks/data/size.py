"""A Parquet manifest of ten million rows: how long it takes to open, how much memory, and how fast it is drawn from.

python benchmarks/data/size.py [--rows 10000000] [--manifest FILE] [--output benchmarks/results/data_size.json]

The manifest is written by this command, of random shapes and captions; FILE is kept, and taken where it is there. It is
opened and drawn from by a process of its own, whose largest resident memory counts. `arachnec compile` of a small model
runs on it and on a manifest of a row of each shape: processor time and resident memory of both. `--compile` measures
this alone. And for the plans of batches that are drawn one by one, stratified by shape
or of one shape each: how many find a plan that was made for an earlier batch with as many clips of each shape, among
the last 256 plans, which is what a run keeps. `--plans` measures this alone, and keeps what the file says of the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

from arachnec.backends.torch_distributed.plans.step_plans import KEPT
from arachnec.data.batch_source import BatchSource
from arachnec.data.parquet_clips import WINDOW, ParquetClips, read_long_manifest
from arachnec.data.stratified import stratified

MODEL = Path(__file__).parents[2] / "tests" / "acceptance" / "models" / "wan.py"
RESULT = Path(__file__).parents[1] / "results" / "data_size.json"
# frames, height, width, weight: stills, short and long clips, as public sets of video have them
SHAPES = (
    (1, 480, 832, 30), (17, 480, 832, 8), (33, 480, 832, 12), (49, 480, 832, 14), (81, 480, 832, 16),
    (33, 832, 480, 5), (81, 832, 480, 5), (49, 640, 640, 4), (33, 720, 1280, 3), (81, 720, 1280, 2),
    (129, 720, 1280, 1),
)  # fmt: skip
STATUS = Path("/proc/self/status")  # its VmHWM is the largest resident memory of this process, in KiB
TEXT = 512  # tokens that captions are padded to
CHUNK = 500_000
BATCHES = 2000
DRAWN = ("one by one", "stratified", "one shape")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open is not None:
        print(json.dumps(opened(options.open)))
        return
    known = json.loads(options.output.read_text()) if options.plans or options.compile else {}
    with tempfile.TemporaryDirectory() as folder:
        path = options.manifest or Path(folder) / "clips.parquet"
        if not options.plans and not path.is_file():
            write(path, options.rows)
        measured = known["manifest"] if known else manifest(path, options.rows)
        if not options.plans:
            measured |= {"compile": compiled(path, Path(folder)), "compile_few": compiled(few(folder), Path(folder))}
    hits = (
        known["plans"] if options.compile else [hit_rate(clips, drawn) for drawn in DRAWN for clips in (4, 8, 16, 64)]
    )
    print(json.dumps(measured, indent=2))
    print(f"{'clips':>6} {'drawn':>12} {'batches':>8} {'plans':>6} {'hits':>6}")
    for line in hits:
        print(f"{line['clips']:>6} {line['drawn']:>12} {line['batches']:>8} {line['plans']:>6} {line['hits']:>6.1%}")
    options.output.write_text(json.dumps({"manifest": measured, "plans": hits}, indent=2) + "\n")


def manifest(path: Path, rows: int) -> dict[str, object]:
    """What it takes to open one of so many rows."""
    row = [sys.executable, __file__, "--open", str(path)]
    measured: dict[str, object] = json.loads(subprocess.run(row, capture_output=True, text=True, check=True).stdout)
    return measured | {"rows": rows, "file_mib": round(path.stat().st_size / 2**20)}


def few(folder: str) -> Path:
    """A manifest of one row of each shape."""
    path = Path(folder) / "few.jsonl"
    rows = [{"frames": f, "height": h, "width": w, "text_tokens": TEXT} for f, h, w, _ in SHAPES]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def compiled(path: Path, folder: Path) -> dict[str, object]:
    """`arachnec compile` of a small Wan2.1 for batches of 64: the process and those that it waited for."""
    words = ["compile", MODEL, "--data", path, "--batch", 64, "--cluster", "4:cpu", "-o", folder / path.stem]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "arachnec.cli", *map(str, words)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, f"compile ended with {status}"
    wall = time.perf_counter() - began
    return {
        "processor_s": round(used.ru_utime + used.ru_stime, 1),
        "wall_s": round(wall, 1),
        "peak_gib": round(used.ru_maxrss / 2**20, 3),
    }


def write(path: Path, rows: int) -> None:
    import pyarrow
    import pyarrow.parquet

    writer = None
    for first in range(0, rows, CHUNK):
        rng = random.Random(first)
        count = min(CHUNK, rows - first)
        shapes = rng.choices(SHAPES, [shape[3] for shape in SHAPES], k=count)
        columns = {key: [shape[place] for shape in shapes] for place, key in enumerate(("frames", "height", "width"))}
        captions = [f"a caption of clip {first + n}, as long as short ones are" for n in range(count)]
        table = pyarrow.table({**columns, "text_tokens": [TEXT] * count, "caption": captions})
        writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def opened(path: Path) -> dict[str, object]:
    """What it takes to open the manifest, to draw the first batch of 64, to draw on; and to find its shapes, as
    `compile` does."""
    began = time.perf_counter()
    long, clips = read_long_manifest(path, 64)
    started = time.perf_counter()
    source = BatchSource(ParquetClips(path, seed=0), 64, repeat=True)
    after_open = time.perf_counter()
    source.draw()
    first = time.perf_counter()
    for _ in range(BATCHES):
        source.draw()
    ended = time.perf_counter()
    (peak,) = (int(row.split()[1]) for row in STATUS.read_text().splitlines() if row.startswith("VmHWM"))
    return {
        "compile_s": round(started - began, 3),
        "shapes": len(clips),
        "clips": long.clips,
        "open_s": round(after_open - started, 3),
        "first_batch_s": round(first - after_open, 3),
        "batch_of_64_ms": round((ended - first) / BATCHES * 1e3, 3),
        "peak_gib": round(peak / 2**20, 3),
    }


def hit_rate(clips: int, drawn: str) -> dict[str, object]:
    """Of batches of so many clips those that need no plan."""
    kept: OrderedDict[object, None] = OrderedDict()
    hits, total = 0, 5000
    for shapes in batches_of(clips, total, drawn):
        key = tuple(sorted(Counter(shapes).items()))
        hits += key in kept
        kept[key] = None
        kept.move_to_end(key)
        if len(kept) > KEPT:
            kept.popitem(last=False)
    return {"clips": clips, "drawn": drawn, "batches": total, "plans": total - hits, "hits": hits / total}


def batches_of(clips: int, batches: int, drawn: str) -> Iterator[list[tuple[int, ...]]]:
    rng, weights = random.Random(clips), [shape[3] for shape in SHAPES]
    if drawn == "one shape":
        for _ in range(batches):
            yield rng.choices(SHAPES, weights, k=1) * clips
        return
    rows: list[tuple[int, ...]] = []
    while len(rows) < clips * batches:  # windows as ParquetClips has them
        window = rng.choices(SHAPES, weights, k=WINDOW)
        dealt = stratified(window, WINDOW // clips, rng) if drawn == "stratified" else [list(range(WINDOW))]
        rows += [window[place] for batch in dealt for place in batch]
    for first in range(0, clips * batches, clips):
        yield rows[first : first + clips]


if __name__ == "__main__":
    main()
