"""Data sets of a framework that a strategy has distributed carry a mark, and with it what ``fit`` is to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from choros.errors import ConfigError
from choros.parallel.data import kind_of

__all__ = ["for_fit_of", "is_marked", "marked"]

_MARK = "_choros_for_fit"


def marked(dataset: Any, for_fit: Callable[[], Any]) -> Any:
    """``dataset`` itself, which from now on is known to be distributed; ``for_fit`` gives what ``fit`` trains on."""
    setattr(dataset, _MARK, for_fit)
    return dataset


def is_marked(dataset: Any) -> bool:
    """Whether ``dataset`` is marked, or was made from one that is."""
    return any(hasattr(each, _MARK) for each in kind_of(dataset).sources(dataset))


def for_fit_of(dataset: Any) -> Any:
    """What ``fit`` is to train on.

    Raises:
        ConfigError: ``dataset`` was made from one that is marked.
    """
    if not hasattr(dataset, _MARK):
        raise ConfigError(
            "the data set was transformed after the strategy had dealt it out to the replicas: do so before."
        )
    return getattr(dataset, _MARK)()
