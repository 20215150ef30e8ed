"""Collectives of Python objects, which are pickled on one rank and unpickled on the others."""

from collections.abc import Callable
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from choros.comm import ProcessSet, global_process_set
from choros.comm.facts import learned_fact, note_fact
from choros.parallel.ops import root_index
from choros.parallel.structure import leaves
from choros.settings import current

T = TypeVar("T")


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Sends the object of ``root_rank`` to every rank (Horovod's ``broadcast_object``).

    Args:
        obj: the object to send; ignored on other ranks.
        root_rank: a global rank.
        name: shown in errors.
        process_set: the participating ranks.

    Returns:
        A copy of the object; on the root, ``obj`` itself.

    Example:
        >>> import choros
        >>> choros.init()
        >>> broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    communicator, name = process_set.communicator, name or "broadcast_object"
    if communicator.is_new:
        return learned_fact(obj)
    root = root_index(root_rank, process_set)
    is_root, sender = communicator.rank == root, communicator.launched[root]
    pickled = cloudpickle.dumps(obj) if is_root else b""
    length = communicator.broadcast(np.int64(len(pickled)), root, name=f"{name} (length)")
    # Once all have received the length they count as many collectives.
    signatures, number = communicator.signatures, communicator.collectives
    if is_root:
        buffer = np.frombuffer(signatures.sign(pickled, collective=number, rank=communicator.rank), np.uint8)
    else:
        buffer = np.empty(int(length) + signatures.overhead, np.uint8)
    root = communicator.first_left([sender], "the sender of an object")  # other ranks may have been lost meanwhile
    received = communicator.broadcast(buffer, root, name=name)
    if communicator.elastic:
        sent = pickled if is_root else received.tobytes()
        communicator.when_settled(lambda: note_fact(sent))
    if is_root:
        return obj
    rank = communicator.launched.index(sender)
    return cloudpickle.loads(signatures.verified(received.tobytes(), collective=number, rank=rank))


def shared_result(own: T) -> T:
    """Returns ``own``, the result of a call that all ranks make outside of openings; in a new rank, which has passed by
    what the others have done, that of rank 0, if it consists of numbers, texts and arrays.
    """
    communicator = global_process_set.communicator
    if not (communicator.elastic and current().spawn):
        return own
    if communicator.is_new:
        return learned_fact(own)
    is_plain = all(isinstance(leaf, int | float | str | np.generic | np.ndarray) for leaf in leaves(own))
    note_fact(cloudpickle.dumps(own) if is_plain else b"")
    return own


def object_of_first(make: Callable[[], T]) -> T:
    """Sends ``make()`` of the first rank that is left to all ranks; its exception is raised on all of them.

    >>> import choros
    >>> choros.init()
    >>> object_of_first(lambda: 17)
    17
    """
    communicator = global_process_set.communicator

    def collective() -> tuple[Any, Exception | None]:
        made: Any = None
        error: Exception | None = None
        if communicator.rank == 0 or communicator.is_new:
            try:
                made = make()
            except Exception as raised:  # noqa: BLE001  (the others would wait for what was made)
                error = raised
        return broadcast_object((made, error))  # type: ignore[no-any-return]

    made: T
    made, error = communicator.atomic(collective)
    if error is not None:
        raise error
    return made


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Returns the objects of all ranks, in rank order, on every rank (Horovod's ``allgather_object``).

    Args:
        obj: the object of this rank, of any size and of any type that cloudpickle supports.
        name: shown in errors.
        process_set: the participating ranks.

    Example:
        >>> import choros
        >>> choros.init()
        >>> allgather_object("a")
        ['a']
    """
    communicator = process_set.communicator
    name = name or "allgather_object"
    pickled = cloudpickle.dumps(obj)
    members: tuple[int, ...] = ()
    while members != communicator.launched:  # else a rank was lost in between
        lengths = communicator.allgather(np.int64(len(pickled)), name=f"{name} (length)")
        members, signatures, number = communicator.launched, communicator.signatures, communicator.collectives
        signed = signatures.sign(pickled, collective=number, rank=communicator.rank)
        gathered = communicator.allgather(np.frombuffer(signed, np.uint8), name=name)
    parts = np.split(gathered, np.cumsum(lengths + signatures.overhead)[:-1])
    return [
        cloudpickle.loads(signatures.verified(part.tobytes(), collective=number, rank=rank))
        for rank, part in enumerate(parts)
    ]
