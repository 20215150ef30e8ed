"""Data sets distributed to replicas: each gets its rows of every global batch.

::

    global batches     0 1 2 3 | 4 5 6 7 | 8
    replica 0          0 1     | 4 5     | 8          the rows of choros.topology.shard_range
    replica 1              2 3 |     6 7 | (none)     a batch of no rows: all replicas run the same number of steps

``choros.parallel.data`` splits each kind of data set. A ``tf.data.Dataset`` becomes another one, with a mark
(``marks.py``); all others become a ``DistributedDataset`` (``distributed.py``). ``fit`` supports replicas with fewer
batches: for it, ``split_batches`` drops empty ones at the end.
"""

from choros.distribute.datasets.distributed import DistributedDataset
from choros.distribute.datasets.splitting import distribute, from_function, is_distributed, split_batches
from choros.parallel.data.tf_auto_shard import AutoShardPolicy

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "distribute",
    "from_function",
    "is_distributed",
    "split_batches",
]
