"""Collectives of Python objects, with the arguments of Horovod's TensorFlow API."""

from collections.abc import Callable
from typing import Any

from choros.comm import ProcessSet, global_process_set
from choros.parallel import objects
from choros.parallel.variants import documented

_SESSION = "Horovod's; has no effect, because objects do not pass through TensorFlow."


@documented(obj="any object that cloudpickle supports; ignored on other ranks.", session=_SESSION)
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends the object of ``root_rank`` to every rank.

    Returns:
        A copy of the object; on the root, ``obj`` itself.

    Example:
        >>> import choros.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    del session
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Returns ``broadcast_object`` as a function of the object alone."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


@documented(obj="the object of this rank.", session=_SESSION)
def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks, in rank order, on every rank."""
    del session
    return objects.allgather_object(obj, name, process_set)
