"""The program that mpirun starts for each rank: ``python -I -S …/wrapper/__main__.py OPTIONS -- COMMAND``.

It stays beside the rank for as long as that runs. So it takes nothing but the standard library and what choros needs of
itself: ``-S`` leaves out site-packages with all that ``.pth`` files import, ``-I`` whatever ``PYTHON…`` variables are
meant for the rank.
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
