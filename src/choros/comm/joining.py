"""Joining: a rank that has no more batches takes part in what the others do, with zeros or without rows."""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from choros.comm.matching import Matching
from choros.comm.primitives import Moves
from choros.comm.request import JOINED, SHUTDOWN, CollectiveSpec, Request
from choros.comm.transfers import take_part_in
from choros.errors import EngineError, MismatchError

#: What a rank that has joined knows of the others' request: nothing, nothing but how to learn it, or all.
_UNKNOWN, _LEARNS, _KNOWN = range(3)


@final
class Joining:
    """The part of a communicator's ranks that have joined, and of the others, when some have."""

    def __init__(self, members: Moves, matching: Matching, when_settled: Callable[[Callable[[], None]], None]) -> None:
        self._members = members
        self._matching = matching
        self._when_settled = when_settled
        #: The members that had not joined at the last collective, if others had; as the launcher numbers them.
        self.not_joined: tuple[int, ...] = ()
        #: By the digest of a request, how a rank that has joined takes part.
        self._specs: dict[int, CollectiveSpec] = {}
        self._explanation = b""

    def join_once(
        self,
        requests: Callable[[], Sequence[Request]],
        take_part: Callable[[Request, list[int]], None],
        learn: Callable[[bytes], Sequence[Request]] | None,
    ) -> bool:
        """Participates in one collective; returns whether all ranks have joined."""
        digests, values = self._matching.gather(JOINED, 0)
        others = {*digests} - {JOINED.digest}
        if not others:
            return True
        if len(others) > 1 and SHUTDOWN.digest not in others:
            self._matching.compare(JOINED)  # the others' calls differ; they report it
            return False
        (digest, *_) = others
        request = next((request for request in requests() if request.digest == digest), None)
        knows = _KNOWN if request is not None or digest in self._specs else _LEARNS if learn else _UNKNOWN
        if not self.joined_ranks_take_part(JOINED, digests, knows=knows):
            raise self._matching.mismatch(JOINED, digests)
        if request is None and digest not in self._specs and learn is not None:
            learned = learn(self._explanation)
            request = next((request for request in learned if request.digest == digest), None)
            if request is None:
                raise EngineError(
                    "this rank has joined, and cannot do what the others do next: it has another device, or other "
                    f"settings of CHOROS_…. It would do: {'; '.join(map(str, learned))}."
                )
        if request is not None:
            take_part(request, values)
            return False
        spec = self._specs[digest]
        if spec.root is None or digests[spec.root] != JOINED.digest:
            take_part_in(self._members, spec, values)
        return False

    def joined_ranks_take_part(self, request: Request, digests: Sequence[int], *, knows: int = _KNOWN) -> bool:
        """Whether ranks have joined, and can participate in the one request of all others; all ask. Only a joined rank
        knows what it knows: so another control message. If one does not, the first that has not joined sends a spec,
        or an explanation, with its length as a negative number, and signed if connections need it.
        """
        members = self._members
        if JOINED.digest not in digests or len({*digests}) > 2:
            return False
        asking = [rank for rank, digest in enumerate(digests) if digest != JOINED.digest]
        not_joined = tuple(members.launched[rank] for rank in asking)
        self._when_settled(lambda: setattr(self, "not_joined", not_joined))
        message, sign = b"" if request.spec is None else request.spec.encode(), 1
        if request.explain is not None:
            message, sign = request.explain(), -1
            if members.signatures is not None:
                message = members.signatures.sign(message, collective=members.collectives, rank=members.rank)
        header = np.array((knows, sign * len(message)), np.int64)
        known, lengths = self._matching.control_message(request, header)
        if {*known} == {_KNOWN}:
            return True
        sender, length = asking[0], lengths[asking[0]]
        if length == 0 or (length < 0 and _UNKNOWN in known):
            return False
        sent = [abs(length) if rank == sender else 0 for rank in range(members.size)]
        shared = self._matching.share(message if members.rank == sender else b"", sent)[sender]
        if length > 0:
            self._specs[digests[sender]] = CollectiveSpec.decode(shared)
        elif members.signatures is None:
            self._explanation = shared
        else:
            self._explanation = members.signatures.verified(shared, collective=members.collectives, rank=sender)
        return True

    def check_root(self, request: Request, digests: Sequence[int]) -> None:
        """Raises a ``MismatchError`` on all members if the sender of a broadcast has joined."""
        root = None if request.spec is None else request.spec.root
        if root is not None and digests[root] == JOINED.digest:
            sender = self._members.ranks[root]
            raise MismatchError(f"{request}: rank {sender}, which would send, has joined, and has no values any more.")
