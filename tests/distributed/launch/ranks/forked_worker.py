"""A rank that notes what it finds, and ends as it is asked to: FOLDER HOW."""

import json
import os
import signal
import sys
import time
from pathlib import Path

IMPORTED = "xml.sax" in sys.modules  # nothing here imports it by itself


def main(folder: Path, how: str) -> None:
    rank = int(os.environ["RANK"])
    birth = {"process": os.getpid(), "parent": os.getppid(), "imported": IMPORTED}
    (folder / f"new-{rank}").write_text(json.dumps(birth))
    (folder / f"new-{rank}").rename(folder / str(rank))
    while len(list(folder.glob("[0-9]"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if rank == 0 and how == "well":
        os.write(int(os.environ["ARACHNEC_EVENTS_FD"]), b"an event\n")
    elif how == "well":
        assert "ARACHNEC_EVENTS_FD" not in os.environ
    elif how == "orphans" and rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    elif rank == 0 or how == "orphans":
        time.sleep(600)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        sys.exit(int(how))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
