"""Horovod's errors."""

from typing import Any

from choros.errors import HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than when Horovod was compiled; choros compiles nothing, and does not raise it.

    Args:
        name: the framework.
        version: its version now.
        installed_version: its version then.
    """

    def __init__(self, name: str, version: Any, installed_version: Any) -> None:
        super().__init__(f"{name} {installed_version} was expected, and {version} was found.", name=name)
        self.version = version
        self.installed_version = installed_version
