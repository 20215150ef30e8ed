"""Horovod's stores: one class here, of paths and of URLs that Spark and pyarrow know."""

from choros.spark.store import Store

LocalStore = FilesystemStore = DBFSLocalStore = HDFSStore = Store

__all__ = ["DBFSLocalStore", "FilesystemStore", "HDFSStore", "LocalStore", "Store"]
