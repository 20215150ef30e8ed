"""Global batches, of whatever kind of data set, cut to a process's part of each; a module a kind.

::

    kind_of(data)  ─►  DataKind                    kinds.py: the one table; kind.py: what is asked of a kind
                         ├── ArrayKind             arrays.py
                         ├── PyDatasetKind         py_dataset.py
                         ├── TfDataKind            tf_data.py        these are imported when the first such
                         ├── DataLoaderKind        data_loader.py    data set is seen
                         └── GrainKind             grain_data.py
"""

from choros.parallel.data.kind import DataKind, LocalBatches, Sharding
from choros.parallel.data.kinds import are_arrays, kind_of
from choros.parallel.data.part import Part, check_global_batch, checked, count_rows, cut

__all__ = [
    "DataKind",
    "LocalBatches",
    "Part",
    "Sharding",
    "are_arrays",
    "check_global_batch",
    "checked",
    "count_rows",
    "cut",
    "kind_of",
]
