"""A replica's share of the global batch, where it may be the cause of an error of the framework."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from choros.errors import ChorosError

__all__ = ["shares_named"]

_OF_SHAPES = re.compile(r"shape|dimension|size|broadcast|incompatible", re.IGNORECASE)


@contextmanager
def shares_named(batch_size: Any, replicas: int) -> Iterator[None]:
    """A context in which a framework's error about shapes gets a note on what shapes a replica's arrays have.

    Args:
        batch_size: that of the global batch; ``None`` if the data has batches of its own.
        replicas: the number of replicas.

    Example:
        >>> try:
        ...     with shares_named(8, 2):
        ...         raise ValueError("incompatible shapes: (8, 3) and (4, 3)")
        ... except ValueError as error:
        ...     print(error.__notes__[0][:60])
        choros: a replica has its share of each global batch, 4 of 8
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, ChorosError) and _OF_SHAPES.search(str(error)):
            error.add_note(_note(batch_size, replicas))
        raise


def _note(batch_size: Any, replicas: int) -> str:
    is_known = isinstance(batch_size, int) and batch_size % replicas == 0
    rows = f", {batch_size // replicas} of {batch_size} rows" if is_known else ""
    return (
        f"choros: a replica has its share of each global batch{rows}, along the first axis of every array. If this is "
        "the cause: a model for a fixed number of rows, such as a stateful RNN, is declared for a share, "
        "keras.Input(batch_size=global_batch_size // strategy.num_replicas_in_sync), with batches that all replicas "
        "can share equally; an array whose first axis does not count rows, such as a matrix of all nodes of a graph, "
        "belongs into the model, or into each row."
    )
