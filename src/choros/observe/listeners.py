"""The listeners of a rank: a table from which ``init()`` starts those that are enabled."""

import logging
import os
from collections.abc import Callable, Mapping

from choros.observe import chaos, pipe
from choros.observe.events import REPORTS, listen
from choros.settings import Config

_log = logging.getLogger("choros")


def _log_events(config: Config, environ: Mapping[str, str]) -> Callable[[], None] | None:
    """Logs each event at level ``DEBUG``, unless chorosrun receives all events, and prints them itself."""
    del environ
    wrapper = pipe.take_pipe()
    if config.log_level != "DEBUG" or (wrapper is not None and wrapper.kinds is not REPORTS):
        return None
    return listen(lambda event: _log.debug("%s", event))


#: Each starts a listener, given the configuration and the environment, and returns what removes it; ``None``: it is
#: not enabled.
LISTENERS: tuple[Callable[[Config, Mapping[str, str]], Callable[[], None] | None], ...] = (
    pipe.start,  # to the wrapper, which forwards them to chorosrun
    chaos.start,  # chorosrun --chaos
    _log_events,  # CHOROS_LOG_LEVEL=debug without chorosrun
)


def start_listeners(config: Config, environ: Mapping[str, str] = os.environ) -> list[Callable[[], None]]:
    """Starts the listeners that are enabled; returns for each a function that removes it."""
    stops = [start(config, environ) for start in LISTENERS]
    return [stop for stop in stops if stop is not None]
