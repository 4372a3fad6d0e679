"""``python -m arachnec``."""

from arachnec.cli import main

if __name__ == "__main__":
    main()
