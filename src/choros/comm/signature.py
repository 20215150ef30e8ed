"""Signatures of objects that ranks exchange: what is unpickled comes from a rank of the job. MPI's connections are
those of the job's own processes and need none; Gloo's prove nothing about who is at their other end::

    rank 0                                      rank 1
    object ─ pickle ─► data, HMAC ────────────► HMAC of the same? ─ unpickle ─► object
                 of the key of the communicator, the number of the collective, the rank of the sender, and the data
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import final

from choros.errors import EngineError

_TAG_BYTES = 32


@final
@dataclass(frozen=True)
class Signatures:
    """The signatures of the ranks of one communicator, by a ``key`` that only these ranks have; without one, none.

    >>> signatures = Signatures(b"key")
    >>> signed = signatures.sign(b"data", collective=7, rank=1)
    >>> signatures.verified(signed, collective=7, rank=1)
    b'data'
    >>> signatures.verified(signed, collective=8, rank=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    choros.errors.EngineError: an object was not sent by rank 1: another process interferes ...
    """

    key: bytes | None = field(default=None, repr=False)

    @property
    def overhead(self) -> int:
        """The bytes that a signature adds."""
        return 0 if self.key is None else _TAG_BYTES

    def sign(self, data: bytes, *, collective: int, rank: int) -> bytes:
        """Returns ``data`` with the signature of ``rank``."""
        return data if self.key is None else data + _tag(self.key, data, collective, rank)

    def verified(self, signed: bytes, *, collective: int, rank: int) -> bytes:
        """Returns the data that ``rank`` has signed for this collective, or raises an ``EngineError``."""
        if self.key is None:
            return signed
        data, tag = signed[:-_TAG_BYTES], signed[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self.key, data, collective, rank)):
            raise EngineError(
                f"an object was not sent by rank {rank}: another process interferes with the connections of the ranks. "
                "It was not unpickled. Start the job again, on a network that only its hosts can reach."
            )
        return data

    def branch(self, name: str) -> Signatures:
        """Returns those of another communicator of these ranks."""
        return Signatures(None if self.key is None else hmac.digest(self.key, name.encode(), "sha256"))


def _tag(key: bytes, data: bytes, collective: int, rank: int) -> bytes:
    return hmac.digest(key, b"%d %d " % (collective, rank) + data, "sha256")
