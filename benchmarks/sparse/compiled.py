"""Registers, shared memory and spills of the kernels over lists of key blocks on an H100, from Triton's own compiler.

    python benchmarks/sparse/compiled.py [--json FILE]

Nothing runs: no GPU is needed. FLOPs and bytes are of one program and one entry of its list: two products forward,
three for queries' gradients, four for keys' and values'. Read are rows of keys and values, or of queries and gradients.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from compile_estimate import estimate

from arachnec.kernels.sparse.block_rows import attention_forward, key_gradients, query_gradients
from arachnec.kernels.sparse.critical_keys import mass_options
from arachnec.kernels.sparse.group_mass import group_mass
from arachnec.kernels.sparse.sparse_attention import Tile, launch_options, tiles_of

MASSES = (
    (16, 8, 8),
    (64, 8, 8),
    (16, 32, 8),
    (16, 256, 64),
    (128, 8, 8),
    (256, 8, 8),
)  # features, cells of a group and a block
GROUP, BLOCK = 256, 64
NUMBERS = {
    "tokens": 32760,
    "listed": 512,
    "heads": 12,
    "mask_clip": 0,
    "mask_head": 0,
    "mask_row": 0,
    "scale": 0.125,
}
INDICES = ("query_slots", "key_slots", "indices", "readers", "starts")


def row(name: str, kernel: Any, products: int, size: int, dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    constants = launch_options(size, dtype, tile, -(-GROUP // tile.queries), -(-BLOCK // tile.keys))

    def given(argument: str) -> Any:
        if argument in NUMBERS:
            return NUMBERS[argument]
        if argument in ("lse", "delta"):
            return torch.empty(1, device="meta")
        return torch.empty(1, dtype=torch.int32 if argument in INDICES else dtype, device="meta")

    arguments = tuple(given(argument) for argument in kernel.arg_names if argument not in constants)
    usage = estimate(kernel, arguments, constants)
    pairs = tile.queries * BLOCK if name != "keys" else GROUP * tile.keys
    rows = BLOCK if name != "keys" else GROUP
    return {
        "kernel": name,
        "head": size,
        "dtype": str(dtype).removeprefix("torch."),
        "tile": f"{tile.queries} x {tile.keys}",
        "warps": usage.warps,
        "registers": usage.registers,
        "shared": usage.shared,
        "spilled": usage.spilled,
        "flops": 2 * products * pairs * size,
        "bytes": 2 * rows * size * dtype.itemsize,
    }


def mass_row(rank: int, group: int, block: int) -> dict[str, Any]:
    """Of the sums by group and block; FLOPs and bytes of both ways over a tile of cells."""
    constants = mass_options(rank, group, block)
    numbers, starts = torch.empty(1, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
    usage = estimate(group_mass, (numbers, numbers, numbers, starts, starts, numbers, 4095, 512, 512), constants)
    rows, cells = constants["GROUPS"] * constants["ROWS"], constants["BLOCKS"] * constants["CELLS"]
    row = {"kernel": "mass", "features": rank, "group": group, "block": block, "tile": f"{rows} x {cells}"}
    row |= {"warps": usage.warps, "registers": usage.registers, "shared": usage.shared, "spilled": usage.spilled}
    return row | {"flops": 2 * 2 * rows * cells * rank, "bytes": 2 * 4 * cells * rank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for size in (64, 128, 256):
            kernels = (("forward", attention_forward, 2), ("queries", query_gradients, 3), ("keys", key_gradients, 4))
            for name, kernel, products in kernels:
                tiles = tiles_of(size, dtype)
                tile = tiles.keys if name == "keys" else tiles.queries
                rows.append(row(name, kernel, products, size, dtype, tile))
                print(rows[-1], flush=True)
    for sizes in MASSES:
        rows.append(mass_row(*sizes))
        print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
