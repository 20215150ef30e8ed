"""Global batches of any kind of data set, and which rows of them each process reads in an epoch.

::

    rows.py      Part: the rows of each global batch that belong to a process                                   pure
    plan.py      the plan of an epoch: which batches of which part each rank consumes, as ranks leave and join   pure
    epochs.py    EpochData: what reads any rows of any epoch of a data set
    data_kind.py DataKind: the interface of a kind of data sets
    kinds.py     kind_of(data) ─► DataKind: the table of the kinds, and the kind of arrays and iterables;
                 the others are py_dataset.py, tf_data.py, data_loader.py, grain_data.py: imported on demand
"""
