"""Joining: a rank without batches participates in what the other ranks' steps exchange, until no rank has batches.

It need not know the order: every control message tells what comes next (``Communicator.join``). A step with a loss
that needs its divisor over all ranks, two optimizers and a last batch of one row::

    rank 0, with the row             rank 1, without
    divisor of the loss        ───►  joined: adds zero
    gradients of optimizer 1   ───►  joined: adds zeros
    gradients of optimizer 2   ───►  joined: adds zeros
    joined                     ───►  joined                 the epoch ends on both
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from choros.comm import Communicator, ProcessSet, Request, global_process_set
from choros.errors import ConfigError

#: For each request that does not say itself, by its spec, what a joined rank does: its part after the control message;
#: it receives the value of each rank.
Participation = Mapping[Request, Callable[[Sequence[int]], None]]


def join(
    communicator: Communicator,
    participation: Participation,
    learn: Callable[[bytes], Participation] | None = None,
) -> None:
    """Participates in the others' collectives until all have joined; ``learn`` takes what ``Request.explain`` says.
    Requests with a spec need not be in ``participation``. If a rank cannot participate, all raise MismatchError.
    """
    learned: dict[Request, Callable[[Sequence[int]], None]] = {}

    def requests_of(message: bytes) -> tuple[Request, ...]:
        learned.update(learn(message) if learn else {})
        return tuple(learned)

    def take_part(request: Request, values: Sequence[int]) -> None:
        (participation[request] if request in participation else learned[request])(values)

    communicator.join(
        lambda: (*participation, *learned),  # a part may have added others
        take_part,
        requests_of if learn else None,
    )


def last_to_join(communicator: Communicator) -> int:
    """Returns the first member left of those that joined last, the last time; PeerLostError if all were lost."""
    return communicator.first_left(communicator.last_joined or communicator.launched, "the last rank that had batches")


def has_others(process_set: ProcessSet) -> bool:
    """Whether this rank has others to train with, or may have: the last rank that is left counts its steps, too."""
    return bool(process_set.included()) and process_set.communicator.may_have_others


def process_set_of(sets: Iterable[ProcessSet], owners: str) -> ProcessSet:
    """Returns the one whose ranks a rank that joins waits for, all ranks if ``owners`` have none."""
    different = set(sets) or {global_process_set}
    if len(different) > 1:
        raise ConfigError(
            f"join() cannot tell which ranks to wait for: the {owners} belong to {len(different)} process sets. Stop "
            "at the same batch on all ranks."
        )
    return different.pop()
