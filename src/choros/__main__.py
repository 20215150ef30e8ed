"""``python -m choros``: the same as ``choros``."""

from choros.cli import main

if __name__ == "__main__":
    main()
