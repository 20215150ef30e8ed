"""This rank's part of a data set, whatever Keras takes as one."""

from __future__ import annotations

from typing import Any

from choros.comm import topology
from choros.errors import ConfigError
from choros.parallel.data import Part, Sharding, kind_of
from choros.parallel.data.shard import check_batch_size

__all__ = ["shard"]


def shard(
    data: Any, batch_size: int | None = None, *, shuffle: bool = False, seed: int = 0, initial_epoch: int = 0
) -> Any:
    """This rank's part of ``data``.

    With ``batch_size`` the result yields batches: those that one process would see, each sharded over all
    ranks, so that training on it is training on the whole. Ranks' parts may differ in size, also in their
    number; choros' callbacks see to it that no rank waits and every example counts the same.

    Pass ``shuffle=False`` to ``model.fit``: of a ``PyDataset`` (which arrays become here) it reorders the
    *batches*, on each rank by itself, and a step then mixes parts of different global batches.

    Args:
        data: what ``model.fit`` takes:

            - *arrays*, or tuples, lists and dicts of them, such as ``(x, y)``. Without ``batch_size``: the
              rows of ``shard_range``. With it: a ``keras.utils.PyDataset``.
            - ``tf.data.Dataset`` of examples. Without ``batch_size``: every size-th element, by
              ``Dataset.shard``; do so early, before elements are decoded. With it: batches, split.
            - ``keras.utils.PyDataset``: its batches are the global ones. Each rank makes all of each batch.
            - torch ``DataLoader``: its batches, or those of ``batch_size``, are the global ones. Only this
              rank's examples are loaded. Random samplers that have no generator get one with the same seed.
            - Grain ``MapDataset`` or ``IterDataset`` of examples.
        batch_size: examples in a batch of *all* ranks together.
        shuffle: for arrays with ``batch_size``: draw a new order of all examples each epoch.
        seed: of the shuffle; the same on all ranks.
        initial_epoch: the epoch at which training resumes, whose order the shuffle goes on with.

    Returns:
        An object of the same kind, for arrays with ``batch_size`` a ``PyDataset``.

    Raises:
        ConfigError: the kind of data is not known, or the batch size does not fit it.

    Example:
        >>> import numpy as np, choros.keras as hvd
        >>> hvd.init()
        >>> batches = hvd.shard((np.arange(10), np.arange(10)), batch_size=4)
        >>> [x.tolist() for x, y in (batches[i] for i in range(len(batches)))]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    place = topology("shard()")
    if batch_size is not None:
        check_batch_size(batch_size, place.size)
    kind = kind_of(data)
    if shuffle and not kind.shuffles:
        raise ConfigError(f"shuffle=True is for arrays; shuffle the {type(data).__name__} itself, alike on all ranks.")
    return kind.shard(data, Sharding(Part(place.rank, place.size), batch_size, shuffle, seed, initial_epoch))
