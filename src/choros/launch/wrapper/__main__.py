"""The program mpirun starts for each rank: ``python -I -S …/wrapper/__main__.py OPTIONS COMMAND``.
It runs as long as the rank, so it imports little; ``-S`` excludes site-packages and ``.pth`` files, and ``-I``
ignores the ``PYTHON…`` variables, which are meant for the rank.
"""

import os
import sys


def _main() -> None:
    path = os.path.abspath(__file__)
    for _ in ("wrapper", "launch", "choros", "src or site-packages"):
        path = os.path.dirname(path)
    sys.path.append(path)
    from choros.launch.wrapper.wrapper import main

    main()


if __name__ == "__main__":
    _main()
