"""This rank's shard of a data set, of any kind that Keras takes."""

import sys
from typing import Any

from choros.comm import global_process_set, topology
from choros.data.kinds import are_arrays, kind_of, shard_of
from choros.data.rows import Part, Sharding, check_global_batch
from choros.errors import ConfigError
from choros.training.keras_internals.fit import hand_over_shards


def shard(
    data: Any, batch_size: int | None = None, *, shuffle: bool = False, seed: int = 0, initial_epoch: int = 0
) -> Any:
    """Returns this rank's shard of ``data``.

    With ``batch_size`` the result yields batches: those that one process would see, each sharded over all
    ranks, so that the ranks together train on the whole data set. Ranks may have batches of different sizes and
    different numbers of batches; with choros' callbacks no rank waits, and all examples have the same weight.

    Pass ``shuffle=False`` to ``model.fit``: it reorders the *batches* of a ``PyDataset`` (which arrays become here)
    on each rank independently, and a step then mixes shards of different global batches.

    Args:
        data: a data set that ``model.fit`` takes:

            - *arrays*, or tuples, lists and dicts of them, such as ``(x, y)``. Without ``batch_size``: the
              rows of ``shard_range``. With it: a ``keras.utils.PyDataset``, or a ``tf.data.Dataset`` in programs
              that use KerasHub, whose models do not take the former.
            - ``tf.data.Dataset`` of examples. Without ``batch_size``: every size-th element, by
              ``Dataset.shard``; do so early, before elements are decoded. With it: batches, split.
            - ``keras.utils.PyDataset``: its batches are the global ones. Each rank produces all of each batch.
            - torch ``DataLoader``: its batches, or those of ``batch_size``, are the global ones. Only this
              rank's examples are loaded. Random samplers that have no generator get one with the same seed.
            - Grain ``MapDataset`` or ``IterDataset`` of examples.
        batch_size: the number of examples in a batch of *all* ranks together.
        shuffle: for arrays with ``batch_size``: whether to draw a new order of all examples each epoch; for a
            ``PyDataset``: of its batches, but for the last one.
        seed: the seed of the shuffle; the same on all ranks.
        initial_epoch: the epoch at which training resumes; the shuffle continues with its order.

    Returns:
        A data set of the same kind; a ``PyDataset`` or a ``tf.data.Dataset`` for arrays with ``batch_size``.

    Raises:
        ConfigError: the kind of data is not known, or the batch size does not fit it.

    Example:
        >>> import numpy as np, choros.keras as hvd
        >>> hvd.init()
        >>> batches = hvd.shard((np.arange(10), np.arange(10)), batch_size=4)
        >>> [x.tolist() for x, y in (batches[i] for i in range(len(batches)))]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """
    here = topology("shard()")
    hand_over_shards()
    if batch_size is not None:
        check_global_batch(batch_size, here.size)
    if batch_size is not None and are_arrays(data) and {"keras_hub", "tensorflow"} <= sys.modules.keys():
        from choros.data.tf_data import array_slices  # KerasHub's models prepare data sets of TensorFlow and Grain only

        data, shuffle = array_slices(data, seed + initial_epoch if shuffle else None), False
    if shuffle and not kind_of(data).shuffles:
        raise ConfigError(
            "shuffle=True is for arrays and for the batches of a PyDataset; shuffle the "
            f"{type(data).__name__} itself, in the same order on all ranks."
        )
    sharding = Sharding(Part(here.rank, here.size), batch_size, shuffle, seed, initial_epoch)
    return shard_of(data, sharding, elastic=global_process_set.communicator.elastic)
