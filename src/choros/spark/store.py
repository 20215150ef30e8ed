"""Where an estimator keeps its rows, commits and logs: a directory that the driver and all executors share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import url2pathname

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


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
