"""``python benchmarks/kernels``: see speed.py."""

from speed import main

main()
