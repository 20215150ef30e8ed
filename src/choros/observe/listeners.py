"""The listeners of a rank: a table, from which ``init()`` starts those that are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from choros.config import Config
from choros.observe import log, pipe
from choros.observe.events import Listener, listen

__all__ = ["LISTENERS", "Row", "start_listeners"]


@dataclass(frozen=True)
class Row:
    """A listener.

    Attributes:
        wanted: whether it is to be started, by the configuration and the environment.
        make: makes it, in the same terms.
    """

    wanted: Callable[[Config, Mapping[str, str]], bool]
    make: Callable[[Config, Mapping[str, str]], Listener]


LISTENERS: tuple[Row, ...] = (
    Row(pipe.wanted, pipe.make),  # to the wrapper, and so to chorosrun
    Row(log.wanted, log.make),  # CHOROS_LOG_LEVEL=debug, where no chorosrun prints them
)


def start_listeners(config: Config, environ: Mapping[str, str] = os.environ) -> list[Callable[[], None]]:
    """Starts the listeners that are wanted; returns what ends each."""
    return [listen(row.make(config, environ)) for row in LISTENERS if row.wanted(config, environ)]
