"""The listeners of a rank: a table from which ``init()`` starts those that are enabled. The first sends events, as
lines of JSON, through a pipe to the wrapper, which forwards them to chorosrun.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

from choros.observe import EVENTS_FD, EVERY_EVENT, chaos
from choros.observe.events import REPORTS, Event, Kind, Listener, listen
from choros.settings import Config

_log = logging.getLogger("choros")
#: POSIX guarantees at least 512; Linux has 4096, macOS 512.
_PIPE_BUF = os.pathconf("/", "PC_PIPE_BUF") if "PC_PIPE_BUF" in os.pathconf_names else 512


@cache
def take_pipe() -> tuple[int, Collection[Kind]] | None:
    """Returns the pipe to the wrapper, and the kinds of events that it reads, or ``None``; removes it from the
    environment: in a child it denotes another file.
    """
    text = os.environ.pop(EVENTS_FD, None)
    if text is None:
        return None
    descriptor = int(text.removesuffix(EVERY_EVENT))
    os.set_inheritable(descriptor, False)
    return descriptor, tuple(Kind) if text.endswith(EVERY_EVENT) else REPORTS


def _send_to_wrapper(config: Config, environ: Mapping[str, str]) -> Callable[[], None] | None:
    """Writes each event to the wrapper's pipe, if there is one."""
    del config, environ
    if (pipe := take_pipe()) is None:
        return None
    descriptor, kinds = pipe
    return listen(writer_to(descriptor), kinds)


def writer_to(descriptor: int) -> Listener:
    """Writes events to a descriptor, never blocks: a full pipe drops them; the next has their number, ``lost``."""
    os.set_blocking(descriptor, False)
    lost = 0

    def write(event: Event) -> None:
        nonlocal lost
        if lost:
            event = replace(event, details={**event.details, "lost": lost})
        line = event.to_json().encode() + b"\n"
        if len(line) > _PIPE_BUF:
            short = {key: value for key, value in event.details.items() if isinstance(value, int | float)}
            line = replace(event, name=f"{event.name[:100]}…", details=short).to_json().encode() + b"\n"
        try:
            # Up to PIPE_BUF bytes are written whole or not at all, also when several threads write.
            os.write(descriptor, line)
        except BlockingIOError:
            lost += 1
        except OSError:  # the wrapper has ended, and this rank ends with it
            return
        else:
            lost = 0

    return write


def _log_events(config: Config, environ: Mapping[str, str]) -> Callable[[], None] | None:
    """Logs each event at level ``DEBUG``, unless chorosrun receives all events, and prints them itself."""
    del environ
    pipe = take_pipe()
    if config.log_level != "DEBUG" or (pipe is not None and pipe[1] is not REPORTS):
        return None
    return listen(lambda event: _log.debug("%s", event))


#: Each starts a listener, given configuration and environment; returns what removes it, ``None`` if it is not enabled.
LISTENERS: tuple[Callable[[Config, Mapping[str, str]], Callable[[], None] | None], ...] = (
    _send_to_wrapper,
    chaos.start,  # chorosrun --chaos
    _log_events,  # CHOROS_LOG_LEVEL=debug without chorosrun
)


def start_listeners(config: Config, environ: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Starts the listeners that are enabled, or none if one cannot be; returns what removes them."""
    with ExitStack() as started:
        for start in LISTENERS:
            if (stop := start(config, environ)) is not None:
                started.callback(stop)
        return started.pop_all().close
