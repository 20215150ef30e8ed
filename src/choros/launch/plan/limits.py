"""How long the parts of a job may take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        start: until every rank has started.
        run: until the job has ended; ``None``: as long as it likes.
        grace: from the signal that asks the ranks to end to the one that does not ask; also, from the chief's end to
            the first signal to the others.
    """

    start: float = 30.0
    run: float | None = None
    grace: float = 20.0
