"""Global batches of any kind of data set, and a process's part of each; one module per kind.

::

    kind_of(data)  ─►  DataKind                    kinds.py: the table; kind.py: the interface of a kind
                         ├── ArrayKind             arrays.py
                         ├── PyDatasetKind         py_dataset.py
                         ├── TfDataKind            tf_data.py        these are imported with the first
                         ├── DataLoaderKind        data_loader.py    such data set
                         └── GrainKind             grain_data.py
"""

from choros.parallel.data.epochs import EpochData
from choros.parallel.data.kind import DataKind, LocalBatches
from choros.parallel.data.kinds import (
    are_arrays,
    data_of,
    elastic_shard,
    epochs_behind,
    epochs_of,
    epochs_of_shard,
    kind_of,
    remember_source,
)
from choros.parallel.data.part import Part, check_global_batch, checked, count_rows, cut, rows_differ
from choros.parallel.data.sharding import Sharding
from choros.parallel.data.steps_of_epoch import StepsOfEpoch, epochs_of_steps

__all__ = [
    "DataKind",
    "EpochData",
    "LocalBatches",
    "Part",
    "Sharding",
    "StepsOfEpoch",
    "are_arrays",
    "check_global_batch",
    "checked",
    "count_rows",
    "cut",
    "data_of",
    "elastic_shard",
    "epochs_behind",
    "epochs_of",
    "epochs_of_shard",
    "epochs_of_steps",
    "kind_of",
    "remember_source",
    "rows_differ",
]
