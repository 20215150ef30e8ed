"""The jobs of a worker or a parameter server that serves one chief after another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from choros.errors import EngineError

__all__ = ["Jobs", "ServedJob"]


@final
class ServedJob:
    """A job, from the connection of its chief to its end."""

    def __init__(self) -> None:
        self.in_order = False

    def ended_in_order(self) -> None:
        """Records that the chief has ended the job, not failed."""
        self.in_order = True


@final
class Jobs:
    """Waits until the first job has ended.

    Args:
        task: what this process is, for errors.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._in_order = False

    @contextmanager
    def job(self) -> Iterator[ServedJob]:
        """The block in which a chief is connected."""
        self._begun.set()
        job = ServedJob()
        try:
            yield job
        finally:
            if not self._ended.is_set():
                self._in_order = job.in_order
            self._ended.set()

    def wait(self, start_seconds: float) -> None:
        """Waits until the first job has ended.

        Raises:
            EngineError: no chief connected within ``start_seconds``, or its connection closed before it ended the job.
        """
        if not self._begun.wait(start_seconds):
            raise EngineError(
                f"the chief did not connect to this {self._task} within {start_seconds:g} s: it has not been started, "
                "has failed, or cannot reach this address. See its output. CHOROS_START_TIMEOUT sets the time limit."
            )
        self._ended.wait()
        if not self._in_order:
            raise EngineError("the connection to the chief closed before the job ended: see the chief's output.")
