"""Events on their way from a rank to chorosrun: lines of JSON in a pipe that the wrapper beside the rank reads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from choros.config import Config
from choros.observe import EVENTS_FD
from choros.observe.events import Event, Listener

__all__ = ["EventPipe", "make", "take_descriptor", "wanted"]

_descriptor: int | None = None


def take_descriptor() -> int | None:
    """The pipe that a wrapper has given this process, if any.

    Taken out of the environment at the first call: in a process that this one starts, the number means another file.
    """
    global _descriptor
    text = os.environ.pop(EVENTS_FD, None)
    if text is not None:
        _descriptor = int(text)
        os.set_inheritable(_descriptor, False)
    return _descriptor


def wanted(config: Config, environ: Mapping[str, str]) -> bool:
    """Whether a wrapper has given this process a pipe."""
    del config, environ
    return take_descriptor() is not None


def make(config: Config, environ: Mapping[str, str]) -> Listener:
    """Writes each event to the wrapper's pipe."""
    del config, environ
    descriptor = take_descriptor()
    assert descriptor is not None  # noqa: S101  (wanted has found it)
    return EventPipe(descriptor).write


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
