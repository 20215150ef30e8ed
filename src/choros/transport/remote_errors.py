"""Errors that one process raises for another."""

from __future__ import annotations

import pickle
import socket
import traceback
from dataclasses import dataclass

import cloudpickle

from choros.errors import EngineError

__all__ = ["Failure"]


@dataclass(frozen=True)
class Failure:
    """An error that another process is to raise.

    Attributes:
        pickled: the error, by cloudpickle, since its class may be one of the user's script.
    """

    pickled: bytes

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """``error``, with the traceback it has here as a note.

        If it does not pickle, an ``EngineError`` with its text.
        """
        there = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickle.loads(cloudpickle.dumps(error))  # noqa: S301
        except Exception:  # noqa: BLE001  (what an exception's own methods raise cannot be foreseen)
            error = EngineError(f"{type(error).__name__}: {error}")
        error.add_note(f"Raised on {socket.gethostname()}:\n{there}")
        return cls(cloudpickle.dumps(error))

    def error(self) -> Exception:
        """What is to be raised."""
        error: Exception = pickle.loads(self.pickled)  # noqa: S301  (from a process that has proved its key)
        return error
