"""How well the formulas that `profile` fits to sparse attention hold here: over lengths and densities, one CPU thread.

    python benchmarks/sparse/profile_fit.py [--grid 21,32,32] [--head 64] [--json FILE]

Residuals are (predicted - measured) / measured of each measurement; below each part the largest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import torch

from arachnec.cost.sparse_profile import fit_sparse
from arachnec.profiling.sparse_kernels import measure_sparse, sparse_grids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="21,32,32", help="frames, rows and columns in tokens")
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    frames, rows, columns = map(int, options.grid.split(","))
    device = torch.device("cpu")
    measured = []
    for grid in sparse_grids((frames, rows, columns), device):
        measured += measure_sparse(grid, 2, options.head, torch.float32, device)
    profile = fit_sparse(options.head, measured)
    for part, residuals in profile.residuals.items():
        print(f"{part:>15}: largest {max(map(abs, residuals)):.3f} of {residuals}")
    if options.json:
        told = msgspec.to_builtins(profile) | {"torch": torch.__version__}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
