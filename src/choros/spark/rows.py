"""A DataFrame's rows for ranks: written once as Parquet, read with pyarrow, and indexed like arrays; and where an
estimator keeps them.

::

    driver      df ── write_parquet ──► /shared/rows/part-00000….parquet, part-00001….parquet, …
                                                   │ row group by row group, once on each machine
    machine     rows.arrays() ──► label.npy, features.npy in the executor's directory, which the job removes
                                                   │ mapped into memory, not read
    ranks       hvd.shard((x, y), batch_size=…) reads its own rows

Parquet decodes row groups, not rows; mapped arrays are read at any row, in any order, by all ranks of the machine and
by those that take the places of lost ones. The order of the rows is that of the files' names and of the rows in them.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from choros.durable import unfinished
from choros.errors import ConfigError
from choros.spark.plan import scratch_directory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


#: Rows that are decoded at once.
_ROWS = 1 << 16
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def write_parquet(
    df: DataFrame, directory: str | os.PathLike[str], columns: Sequence[str] | None = None
) -> ParquetRows:
    """Writes ``columns`` of ``df``, by default all, as Parquet into ``directory``, which all executors can read, and
    replaces what is there. Returns what ranks read them by; give it to them as an argument.

    Columns are numbers, booleans, arrays of numbers of one length, or vectors of ``pyspark.ml``, also sparse ones. A
    path without a scheme is one of a shared file system; ``hdfs://…`` and ``s3a://…`` are what Spark and pyarrow know.

    Example:
        >>> rows = write_parquet(df, "/shared/rows", ["features", "label"])  # doctest: +SKIP
        >>> choros.spark.run(train, (rows,), num_proc=4)  # doctest: +SKIP
    """
    names = tuple(df.columns if columns is None else columns)
    location = os.fspath(directory)
    path = local_path(location)
    if path is not None:
        location = Path(path).absolute().as_uri()
    df.select(*[_stored(df, name) for name in names]).write.mode("overwrite").parquet(location)
    return ParquetRows(location, names)


def _stored(df: DataFrame, name: str) -> Any:
    """Returns the column as what Parquet and NumPy have: vectors become arrays."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import VectorUDT
    from pyspark.sql import types

    if name not in df.columns:
        raise ConfigError(f"the DataFrame has no column {name!r}; it has {', '.join(df.columns)}.")
    kind = df.schema[name].dataType
    element = kind.elementType if isinstance(kind, types.ArrayType) else kind
    if isinstance(kind, VectorUDT):
        return vector_to_array(df[name]).alias(name)
    if isinstance(element, types.DecimalType):
        return df[name].cast("double" if element is kind else "array<double>").alias(name)
    if not isinstance(element, types.NumericType | types.BooleanType):
        raise ConfigError(
            f"column {name!r} is a {kind.simpleString()}: ranks read numbers, arrays of numbers and vectors. Encode "
            "it, for instance with pyspark.ml.feature.StringIndexer."
        )
    return df[name]


@final
@dataclass(frozen=True)
class ParquetRows:
    """Rows in Parquet files below ``location``; ranks get it as an argument, and read ``arrays``.

    Example:
        >>> def train(rows):
        ...     import choros.keras as hvd
        ...     hvd.init()
        ...     x, y = rows.arrays("features", "label")
        ...     data = hvd.shard((x, y), batch_size=128, shuffle=True)
    """

    location: str
    columns: tuple[str, ...]

    def arrays(self, *names: str) -> tuple[np.ndarray[Any, Any], ...]:
        """Returns an array for each column that is named, by default for all: mapped into memory, of all rows, so that
        ``hvd.shard(…, batch_size=…)``, a ``TensorDataset`` or a slice reads those that a rank needs.

        The first rank of a machine that calls this decodes the files, the others wait for it.
        """
        chosen = names or self.columns
        unknown = [name for name in chosen if name not in self.columns]
        if unknown:
            raise ConfigError(f"no column {', '.join(unknown)} was written; there are {', '.join(self.columns)}.")
        system, files = _files(self.location)
        # Its size tells a file from one that another write_parquet has put in its place.
        named = [self.location, *(f"{each.path} {each.size}" for each in files)]
        digest = hashlib.sha256("\n".join(named).encode()).hexdigest()[:16]
        folder = Path(scratch_directory() or _own_scratch()) / f"rows-{digest}"
        folder.mkdir(exist_ok=True)
        paths = {name: folder / f"{self.columns.index(name)}.npy" for name in chosen}
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = {name: path for name, path in paths.items() if not path.exists()}
            rows = _count(system, files) if missing else 0
            for name, path in missing.items():
                with unfinished(path) as own:
                    _decode_column(system, files, name, rows, own)
        return tuple(np.load(paths[name], mmap_mode="r") for name in chosen)

    def delete(self) -> None:
        """Deletes the files, which no rank reads any more."""
        from pyarrow import fs

        system, root = fs.FileSystem.from_uri(_for_pyarrow(self.location))
        system.delete_dir(root)

    def __len__(self) -> int:
        return _count(*_files(self.location))


@cache
def _own_scratch() -> str:
    directory = tempfile.TemporaryDirectory(prefix="choros-rows-")
    atexit.register(directory.cleanup)
    return directory.name


def _for_pyarrow(location: str) -> str:
    return location.replace("s3a://", "s3://", 1)


def _files(location: str) -> tuple[Any, list[Any]]:
    """Returns the file system of ``location`` and the files below it, in the order of the DataFrame's partitions."""
    from pyarrow import fs

    system, root = fs.FileSystem.from_uri(_for_pyarrow(location))
    found = [each for each in system.get_file_info(fs.FileSelector(root)) if each.path.endswith(".parquet")]
    if not found:
        raise ConfigError(f"{location} has no Parquet files: can this machine read what the executors have written?")
    return system, sorted(found, key=lambda each: each.path)


def _count(system: Any, files: Sequence[Any]) -> int:
    from pyarrow import parquet

    return sum(parquet.read_metadata(each.path, filesystem=system).num_rows for each in files)


def _decode_column(system: Any, files: Sequence[Any], name: str, rows: int, path: Path) -> None:
    """Writes a column as an array of all rows, a batch of rows at a time."""
    array: Any = None
    first = 0
    for part in _parts(system, files, name):
        if array is None:
            array = np.lib.format.open_memmap(path, "w+", part.dtype, (rows, *part.shape[1:]))
        if part.shape[1:] != array.shape[1:]:
            raise _uneven(name, first, array.shape[1], part.shape[1])
        array[first : first + len(part)] = part
        first += len(part)
    if array is None:
        raise ConfigError(f"the DataFrame has no rows, so that nothing is known of its column {name!r}.")
    array.flush()


def _parts(system: Any, files: Sequence[Any], name: str) -> Iterator[np.ndarray[Any, Any]]:
    from pyarrow import parquet

    for file in files:
        with parquet.ParquetFile(file.path, filesystem=system) as opened:
            for batch in opened.iter_batches(_ROWS, columns=[name]):
                yield _as_array(batch.column(0), name)


def _as_array(column: Any, name: str) -> np.ndarray[Any, Any]:
    """Returns rows of a column; those of lists as a matrix."""
    from pyarrow import types

    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    values = column.flatten() if is_list else column
    if column.null_count or values.null_count:
        raise ConfigError(f"column {name!r} has nulls: fill them, or drop their rows, with df.na.")
    array: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    if not is_list:
        return array
    width = len(array) // len(column)
    lengths = column.value_lengths().to_numpy(zero_copy_only=False)
    uneven = np.flatnonzero(lengths != width)
    if len(uneven):
        raise _uneven(name, int(uneven[0]), width, int(lengths[uneven[0]]))
    return array.reshape(len(column), width)


def _uneven(name: str, row: int, width: int, other: int) -> ConfigError:
    return ConfigError(
        f"the arrays of column {name!r} have different lengths, such as {width} and {other} (near row {row}): pad them "
        "to one length."
    )


@dataclass(frozen=True)
class Store:
    """A directory of a file system that the driver and all executors share: a path, also of Databricks' ``dbfs:/…``,
    or a URL that Spark and pyarrow know, such as ``hdfs://…``, which has no commits.

    >>> store = Store.create("/shared/work")
    >>> store.get_train_data_path("7"), store.get_checkpoint_path("7"), store.commits("7")
    ('/shared/work/intermediate_train_data.7', '/shared/work/runs/7/checkpoint', '/shared/work/runs/7/commits')
    >>> Store.create("hdfs://a/b").commits("7")
    """

    prefix_path: str

    @classmethod
    def create(cls, prefix_path: str) -> Store:
        """Returns the store of this directory, as in Horovod."""
        path = local_path(prefix_path)
        return cls((prefix_path if path is None else os.path.abspath(path)).rstrip("/"))

    def get_train_data_path(self, run_id: str) -> str:
        """Returns where the rows are to train on."""
        return f"{self.prefix_path}/intermediate_train_data.{run_id}"

    def get_val_data_path(self, run_id: str) -> str:
        """Returns where the rows are to validate with."""
        return f"{self.prefix_path}/intermediate_val_data.{run_id}"

    def get_run_path(self, run_id: str) -> str:
        """Returns the directory of a run."""
        return f"{self.prefix_path}/runs/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str:
        """Returns where the run's checkpoint is, without the ending of its kind."""
        return f"{self.get_run_path(run_id)}/checkpoint"

    def get_logs_path(self, run_id: str) -> str:
        """Returns where callbacks write their logs."""
        return f"{self.get_run_path(run_id)}/logs"

    def commits(self, run_id: str) -> str | None:
        """Returns the directory of the run's commits; ``None`` if that is no path of a file system."""
        return local_path(f"{self.get_run_path(run_id)}/commits")


def local_path(location: str) -> str | None:
    """Returns a location as a path of a file system; ``None`` if it is none.

    >>> local_path("/a b"), local_path("file:///a%20b"), local_path("dbfs:/a"), local_path("s3a://bucket/a")
    ('/a b', '/a b', '/dbfs/a', None)
    """
    if not _URL.match(location):
        return location
    parts = urlsplit(location)
    mounted = {"file": "", "dbfs": "/dbfs"}.get(parts.scheme)
    return None if mounted is None else mounted + url2pathname(parts.path)
