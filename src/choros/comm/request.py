"""The request of a rank: its call of a collective, in a digest that ranks compare before data moves.

::

    rank 0                     rank 1
    request ─ digest, value ──┐ ┌─ digest, value ── request     (1) one control message of 16 bytes a rank
                        ┌─────┴─┴─────┐
    same digests?  ◄────┤  all ranks' ├────►  same digests?     (2) every rank compares the same table
                        │   digests   │
                        └─────────────┘
    yes: the data moves.  no: the requests' texts are gathered, and every rank raises the same MismatchError
"""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["Request", "caller", "mismatch_text"]

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


@dataclass(frozen=True)
class Request:
    """One rank's part in a collective: all that must be the same on every rank.

    Attributes:
        collective: its name.
        arguments: the arguments that must agree, as text, such as ``op=Sum, dtype=float32, shape=(3, 4)``.
        name: the name the caller gave, if any.
    """

    collective: str
    arguments: str = ""
    name: str = ""

    @cached_property
    def digest(self) -> int:
        """63 bits that identify this request."""
        data = "\0".join((self.collective, self.arguments, self.name)).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) >> 1

    def __str__(self) -> str:
        name = [f"name={self.name!r}"] if self.name else []
        return f"{self.collective}({', '.join([*name, *([self.arguments] if self.arguments else [])])})"


def caller() -> str | None:
    """``file:line`` of the innermost frame outside choros; ``None`` if it is called by Python itself."""
    for frame in reversed(traceback.extract_stack()):
        inside = frame.filename.startswith((_PACKAGE, "<"))
        if not inside and "site-packages" not in frame.filename and "/lib/python3" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}"
    return None


def mismatch_text(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """The message of a ``MismatchError``: each rank's request, equal requests together.

    Args:
        texts: each member's request as text.
        ranks: the members' global ranks.

    Example:
        >>> print(mismatch_text(["barrier()", "barrier()", "allreduce()"], [0, 1, 2]))
        Ranks made different calls, so no data was moved:
          ranks 0, 1: barrier()
          rank 2: allreduce()
        Every rank must call the same collectives in the same order, with the same dtypes, shapes and names.
    """
    asked: dict[str, list[int]] = {}
    for text, rank in zip(texts, ranks, strict=True):
        asked.setdefault(text, []).append(rank)
    lines = [f"  rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}: {text}" for text, who in asked.items()]
    return "\n".join(
        [
            "Ranks made different calls, so no data was moved:",
            *lines,
            "Every rank must call the same collectives in the same order, with the same dtypes, shapes and names.",
        ]
    )
