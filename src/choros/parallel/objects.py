"""Any Python object, pickled on one rank and unpickled on others of the same job."""

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
    """Gives every rank a copy of the object of ``root_rank`` (Horovod's ``broadcast_object``).

    Args:
        obj: what to send; ignored on other ranks.
        root_rank: a global rank.
        name: shown in errors.
        process_set: the ranks that take part.

    Returns:
        The object; on the root, ``obj`` itself.

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
    """Gives every rank the objects of all ranks, in their order (Horovod's ``allgather_object``).

    Args:
        obj: this rank's; any size, any type that cloudpickle takes.
        name: shown in errors.
        process_set: the ranks that take part.

    Example:
        >>> import choros
        >>> choros.init()
        >>> allgather_object("mine")
        ['mine']
    """
    communicator = process_set.communicator
    name = name or "allgather_object"
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = communicator.allgather(np.int64(data.size), name=f"{name} (length)")
    together = communicator.allgather(data, name=name)
    return [cloudpickle.loads(part.tobytes()) for part in np.split(together, np.cumsum(lengths)[:-1])]
