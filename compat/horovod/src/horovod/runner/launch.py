"""The command ``horovodrun``, which is ``chorosrun``; ``python -m horovod.runner.launch`` runs it, too."""

from collections.abc import Sequence
from typing import NoReturn

from choros.launch.cli import main

__all__ = ["run_commandline"]


def run_commandline(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs ``horovodrun`` with ``argv`` (default: this process's command line) and exits.

    Flags may be abbreviated, as Horovod's ``argparse`` allows: ``--verb`` for ``--verbose``.
    """
    main(argv, abbreviations=True)


if __name__ == "__main__":
    run_commandline()
