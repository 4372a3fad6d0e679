"""Latents against Diffusers' own pipelines: every family and scheduler, with and without guidance, one and two models.

python -m benchmarks.sampling.parity [FILE.json]
"""

import json
import sys
from pathlib import Path

import torch

from benchmarks.sampling.pipelines import cases, difference

LIMIT = 1e-5


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for case in cases():
        rows.append({"case": str(case), "relative_difference": difference(case)})
        print(f"{rows[-1]['case']:58} {rows[-1]['relative_difference']:.1e}", flush=True)
    worst = max(row["relative_difference"] for row in rows)
    print(f"{len(rows)} cases, the largest {worst:.1e}, {'within' if worst <= LIMIT else 'ABOVE'} {LIMIT:.0e}")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps({"limit": LIMIT, "worst": worst, "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
