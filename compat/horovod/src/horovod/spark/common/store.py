"""Horovod's stores: one class here, of paths and of URLs that Spark and pyarrow know."""

from choros.spark.rows import Store

LocalStore = FilesystemStore = DBFSLocalStore = Store


def HDFSStore(prefix_path):  # noqa: N802  (Horovod's name)
    """Returns a store of HDFS; its host, in a path without one, is the configuration's."""
    return Store.create(prefix_path if "://" in prefix_path else f"hdfs://{prefix_path}")


__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]
