"""The event pipe: sends a rank's events, as lines of JSON, to the wrapper, which forwards them to chorosrun."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import final

from choros.config import Config
from choros.observe import EVENTS_FD, EVERY_EVENT
from choros.observe.events import REPORTS, Event, Kind, Listener

__all__ = ["EventPipe", "kinds", "make", "take_descriptor", "wanted"]

_descriptor: int | None = None
_kinds: Collection[Kind] = REPORTS


def take_descriptor() -> int | None:
    """Returns the descriptor of the wrapper's pipe; ``None`` if there is none.

    The first call removes it from the environment: in a child process, the number denotes another file.
    """
    global _descriptor, _kinds
    text = os.environ.pop(EVENTS_FD, None)
    if text is not None:
        _descriptor = int(text.removesuffix(EVERY_EVENT))
        os.set_inheritable(_descriptor, False)
        _kinds = tuple(Kind) if text.endswith(EVERY_EVENT) else REPORTS
    return _descriptor


def kinds() -> Collection[Kind]:
    """Returns the kinds of events that the wrapper reads."""
    take_descriptor()
    return _kinds


def wanted(config: Config, environ: Mapping[str, str]) -> bool:
    """Returns whether the wrapper reads this process's events."""
    del config, environ
    return take_descriptor() is not None


def make(config: Config, environ: Mapping[str, str]) -> Listener:
    """Returns a listener that writes each event to the wrapper's pipe."""
    del config, environ
    descriptor = take_descriptor()
    assert descriptor is not None  # noqa: S101  (checked by wanted)
    return EventPipe(descriptor).write


@final
class EventPipe:
    """Writes events to a descriptor and never blocks.

    If the pipe is full, events are dropped: training must not wait for the reader. The next event that fits contains
    the number of dropped events, ``lost``.
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
        except OSError:  # the wrapper has ended, and this rank ends with it
            return
        else:
            self._lost = 0


#: POSIX guarantees at least 512; Linux has 4096, macOS 512.
_PIPE_BUF = os.pathconf("/", "PC_PIPE_BUF") if "PC_PIPE_BUF" in os.pathconf_names else 512


def _cut(event: Event) -> bytes:
    """Returns a shortened line for an event that does not fit."""
    short = {key: value for key, value in event.details.items() if isinstance(value, int | float)}
    return Event(event.kind, event.name[:100] + "…", event.rank, event.time, short).to_json().encode() + b"\n"
