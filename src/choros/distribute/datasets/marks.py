"""The mark on a framework's data set that a strategy has distributed; it stores the data on which ``fit`` trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from choros.errors import ConfigError
from choros.parallel.data import kind_of

__all__ = ["for_fit_of", "is_marked", "mark"]

_MARK = "_choros_for_fit"


def mark(dataset: Any, for_fit: Callable[[], Any]) -> Any:
    """Marks ``dataset`` as distributed and returns it; ``for_fit`` returns the data on which ``fit`` trains."""
    setattr(dataset, _MARK, for_fit)
    return dataset


def is_marked(dataset: Any) -> bool:
    """Whether ``dataset`` is marked, or was derived from a marked one."""
    return any(hasattr(each, _MARK) for each in kind_of(dataset).sources(dataset))


def for_fit_of(dataset: Any) -> Any:
    """Returns the data on which ``fit`` trains.

    Raises:
        ConfigError: ``dataset`` was derived from a marked one.
    """
    if not hasattr(dataset, _MARK):
        raise ConfigError("the data set was transformed after the strategy had distributed it: transform it before.")
    return getattr(dataset, _MARK)()
