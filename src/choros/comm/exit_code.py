"""The exit code of a program that the loss of a peer ends."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType

from choros.errors import PeerLostError

__all__ = ["exit_with_code_of_loss"]


@cache
def exit_with_code_of_loss() -> None:
    """From now on, a ``PeerLostError`` that nothing catches ends the program with its ``exit_code``, not with 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        if isinstance(error, PeerLostError):
            raise SystemExit(error.exit_code)  # Python then ends as after sys.exit() in the program

    sys.excepthook = hook
