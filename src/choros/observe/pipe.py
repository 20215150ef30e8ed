"""The event pipe: sends a rank's events, as lines of JSON, to the wrapper, which forwards them to chorosrun."""

import os
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import NamedTuple, final

from choros.observe import EVENTS_FD, EVERY_EVENT
from choros.observe.events import REPORTS, Event, Kind, listen
from choros.settings import Config


class WrapperPipe(NamedTuple):
    """The pipe to the wrapper, and the kinds of events that it reads."""

    descriptor: int
    kinds: Collection[Kind]


@cache
def take_pipe() -> WrapperPipe | None:
    """Returns the wrapper's pipe, or ``None``; removes it from the environment: in a child it denotes another file."""
    text = os.environ.pop(EVENTS_FD, None)
    if text is None:
        return None
    descriptor = int(text.removesuffix(EVERY_EVENT))
    os.set_inheritable(descriptor, False)
    return WrapperPipe(descriptor, tuple(Kind) if text.endswith(EVERY_EVENT) else REPORTS)


def start(config: Config, environ: Mapping[str, str]) -> Callable[[], None] | None:
    """Writes each event to the wrapper's pipe, if there is one."""
    del config, environ
    pipe = take_pipe()
    return None if pipe is None else listen(EventPipe(pipe.descriptor).write, pipe.kinds)


@final
class EventPipe:
    """Writes events to a descriptor, never blocks: a full pipe drops them; the next has their number, ``lost``."""

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
