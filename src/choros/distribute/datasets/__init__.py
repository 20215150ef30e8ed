"""Data sets dealt out to replicas: each gets its rows of every global batch.

::

    global batches     0 1 2 3 | 4 5 6 7 | 8
    replica 0          0 1     | 4 5     | 8          the rows of choros.topology.shard_range
    replica 1              2 3 |     6 7 | (none)     a batch of no rows: all replicas make the same number of steps

What is given out is of two kinds: of a ``tf.data.Dataset`` another (``tf_data.py``), of all else a
``DistributedDataset`` (``distributed.py``). ``fit`` copes with replicas that have fewer batches: for it,
``split_batches`` leaves empty ones out.
"""

from choros.distribute.datasets.auto_shard import AutoShardPolicy
from choros.distribute.datasets.distributed import DistributedDataset
from choros.distribute.datasets.splitting import distribute, from_function, is_distributed, split_batches

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "distribute",
    "from_function",
    "is_distributed",
    "split_batches",
]
