"""The worker of ``benchmarks/four_hosts.py``, whose plans are of one model: a rank captures it once."""

import sys

from hosts.worker import main

from arachnec.launch.ending import exit_with
from tests.distributed.executor_cases import captured_once

if __name__ == "__main__":
    with captured_once():
        exit_with(lambda: main(*sys.argv[1:]))
