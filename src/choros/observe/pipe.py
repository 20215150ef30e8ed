"""Events on their way from a rank to chorosrun: lines of JSON in a pipe that the wrapper beside the rank reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from choros.config import Config
from choros.observe.events import Event, Listener

__all__ = ["EVENTS_FD", "EventPipe", "make", "wanted"]

#: The variable in which a wrapper gives its rank the pipe's descriptor.
EVENTS_FD = "CHOROS_EVENTS_FD"


def wanted(config: Config, environ: Mapping[str, str]) -> bool:
    """If a wrapper has given this process a pipe."""
    del config
    return EVENTS_FD in environ


def make(config: Config, environ: Mapping[str, str]) -> Listener:
    """Writes each event to the wrapper's pipe."""
    del config
    return EventPipe(int(environ[EVENTS_FD])).write


@final
class EventPipe:
    """Writes events to a descriptor and never waits for who reads them.

    A pipe that is full loses events rather than time: training must not wait for its observer. The next event that
    fits carries the number of those ``lost`` before it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lost = 0
        os.set_blocking(descriptor, False)

    def write(self, event: Event) -> None:
        """Writes ``event``, if the pipe has room for all of it."""
        if self._lost:
            event = Event(event.kind, event.name, event.rank, event.time, {**event.details, "lost": self._lost})
        line = event.to_json().encode() + b"\n"
        try:
            # Up to PIPE_BUF bytes are written whole or not at all, also when several threads write.
            os.write(self._descriptor, line if len(line) <= _PIPE_BUF else _cut(event))
        except BlockingIOError:
            self._lost += 1
        except OSError:  # the wrapper has gone, and this rank is about to
            return
        else:
            self._lost = 0


#: What POSIX promises at least is 512; Linux and macOS have 4096 and 512.
_PIPE_BUF = os.pathconf("/", "PC_PIPE_BUF") if "PC_PIPE_BUF" in os.pathconf_names else 512


def _cut(event: Event) -> bytes:
    """A line for an event whose names do not fit."""
    short = {key: value for key, value in event.details.items() if isinstance(value, int | float)}
    return Event(event.kind, event.name[:100] + "…", event.rank, event.time, short).to_json().encode() + b"\n"
