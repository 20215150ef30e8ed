"""The log listener: writes events to the log, with ``CHOROS_LOG_LEVEL=debug``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from choros.config import Config
from choros.observe.events import REPORTS, Event, Listener
from choros.observe.pipe import kinds

__all__ = ["make", "wanted"]

_log = logging.getLogger("choros")


def wanted(config: Config, environ: Mapping[str, str]) -> bool:
    """Returns whether the level is ``DEBUG`` and chorosrun, which prints all ranks' events itself, is not used."""
    del environ
    return config.log_level == "DEBUG" and kinds() == REPORTS


def make(config: Config, environ: Mapping[str, str]) -> Listener:
    """Returns a listener that logs each event."""
    del config, environ

    def log(event: Event) -> None:
        _log.debug("%s", event)

    return log
