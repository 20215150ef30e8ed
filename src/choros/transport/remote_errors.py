"""Remote errors: caught in one process and raised in another."""

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
    """An error to be raised in another process.

    Attributes:
        pickled: the error, pickled with cloudpickle, since its class may be defined in the user's script.
    """

    pickled: bytes

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Pickles ``error`` with its traceback as a note.

        An error that cannot be pickled is replaced by an ``EngineError`` with its text.
        """
        trace = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickle.loads(cloudpickle.dumps(error))  # noqa: S301
        except Exception:  # noqa: BLE001  (an exception's own methods may raise anything)
            error = EngineError(f"{type(error).__name__}: {error}")
        error.add_note(f"Raised on {socket.gethostname()}:\n{trace}")
        return cls(cloudpickle.dumps(error))

    def error(self) -> Exception:
        """Returns the error to raise."""
        error: Exception = pickle.loads(self.pickled)  # noqa: S301  (from an authenticated process)
        return error
