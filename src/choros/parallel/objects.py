"""Collectives of Python objects, which are pickled on one rank and unpickled on the others."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np

from choros.comm import ProcessSet, global_process_set
from choros.parallel.ops import broadcast

__all__ = ["allgather_object", "broadcast_object"]


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
    name = name or "broadcast_object"
    is_root = process_set.communicator.ranks[process_set.communicator.rank] == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj) if is_root else b"", np.uint8)
    length = broadcast(np.int64(data.size), root_rank, name=f"{name} (length)", process_set=process_set)
    buffer = data if is_root else np.empty(int(length), np.uint8)
    received = broadcast(buffer, root_rank, name=name, process_set=process_set)
    return obj if is_root else cloudpickle.loads(received.tobytes())


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
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = communicator.allgather(np.int64(data.size), name=f"{name} (length)")
    gathered = communicator.allgather(data, name=name)
    return [cloudpickle.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(lengths)[:-1])]
