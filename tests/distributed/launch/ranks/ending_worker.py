"""Two ranks that note their processes, of which the second ends as it is asked to: FOLDER HOW."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main(folder: Path, how: str) -> None:
    rank = os.environ["RANK"]
    (folder / rank).write_text(str(os.getpid()))
    if rank == "0":
        time.sleep(600)
    while not (folder / "0").exists():
        time.sleep(0.01)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
