"""Data-parallel training for users of Spark: a barrier stage places the ranks, chorosrun's engine runs them.

::

    import choros.spark

    rows = choros.spark.write_parquet(df, "/shared/rows", ["features", "label"])
    histories = choros.spark.run(train, (rows,), num_proc=4)       # train calls choros.keras.init()

``choros.spark.keras`` and ``choros.spark.torch`` have estimators. Nothing here imports pyspark before it is used, as
ranks import this package, too.
"""

from choros.spark.plan import get_available_devices
from choros.spark.rows import ParquetRows, write_parquet
from choros.spark.run import Distributor, run, run_elastic

__all__ = ["Distributor", "ParquetRows", "get_available_devices", "run", "run_elastic", "write_parquet"]
