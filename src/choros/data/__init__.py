"""Global batches of any kind of data set, and which rows of them each process reads in an epoch.

::

    rows.py      Part: the rows of each global batch that belong to a process                                   pure
    plan.py      the plan of an epoch: which batches of which part each rank consumes, as ranks leave and join   pure
    epochs.py    EpochData: what reads any rows of any epoch of a data set
    kinds.py     kind_of(data) ─► DataKind: the table of the kinds, and their interface
                   ├── ArrayKind             arrays.py
                   ├── PyDatasetKind         py_dataset.py
                   ├── TfDataKind            tf_data.py        these are imported with the first
                   ├── DataLoaderKind        data_loader.py    such data set
                   └── GrainKind             grain_data.py
"""
