"""A rank that leaves, and is stopped in its last line where it is the one that its argument names."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__" and os.environ["RANK"] == sys.argv[1]:
    os.kill(os.getpid(), signal.SIGSTOP)
