"""Global batches of any kind of data set, and which rows of them each process reads in an epoch.

::

    rows.py      Part: the rows of each global batch that belong to a process                                   pure
    plan.py      the plan of an epoch: which batches of which part each rank consumes, as ranks leave and join   pure
    epochs.py    EpochData: what reads any rows of any epoch of a data set
    kinds.py     kind_of(data) ─► DataKind: the interface, and the table of the kinds, which are imported on demand:
                 array_data.py, py_dataset.py, tf_data.py, data_loader.py, grain_data.py
"""
