"""Joining: a rank without batches participates in what the other ranks' steps exchange, until no rank has batches.

It need not know the order: every control message tells what comes next (``Communicator.join``). A step with a loss that
needs its divisor over all ranks, two optimizers and a last batch of one row::

    rank 0, with the row             rank 1, without
    divisor of the loss        ───►  joined: adds zero
    gradients of optimizer 1   ───►  joined: adds zeros
    gradients of optimizer 2   ───►  joined: adds zeros
    joined                     ───►  joined                 the epoch ends on both
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from choros.comm import Communicator, Request

__all__ = ["Participation", "join"]

#: For each request in which a joined rank can participate, its part after the control message: it receives the value
#: of each rank.
Participation = Mapping[Request, Callable[[Sequence[int]], None]]


def join(communicator: Communicator, participation: Participation) -> None:
    """Participates in the other ranks' collectives until all ranks have joined.

    Raises:
        MismatchError: on all ranks, if the others' next collective is not in ``participation``.
    """
    requests = tuple(participation)
    while True:
        with communicator.exclusive():
            joined = communicator.join(requests)
            if joined is None:
                return
            request, values = joined
            participation[request](values)
