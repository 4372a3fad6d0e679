"""A rank that tells its process and does nothing."""

from __future__ import annotations

import os
import time

if __name__ == "__main__":
    print(os.getpid(), flush=True)
    time.sleep(600)
