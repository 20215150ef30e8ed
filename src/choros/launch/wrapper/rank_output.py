"""What a rank writes, as its wrapper reads it: pipes, whose bytes become frames (``transcript.py``), and a page
(``observe/progress.py``). A rank that waits in C for data that do not move cannot report it: the page says so.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO

from choros import durations
from choros.launch.protocol.frames import EVENTS, Frame, Written
from choros.launch.wrapper.transcript import Transcript
from choros.observe.events import Event, Kind
from choros.observe.processes import resident_bytes
from choros.observe.progress import PAGE_BYTES, PROGRESS_FD, RankProgress, note_end, read_page
from choros.transport.loop import Loop

_PIPE_READ = 1 << 16
#: After a read smaller than this, wait for more data to fill a frame: one frame per line costs ten times as much.
_SMALL_READ = 1 << 14


@dataclass(eq=False)
class RankOutput:
    """Reads what ``rank`` writes, and sends the frames by ``send``; ``is_alive``: whether the rank runs."""

    rank: int
    loop: Loop
    send: Callable[[Frame], None]
    is_alive: Callable[[], bool]
    transcript: Transcript = field(init=False)
    _pipes: set[IO[bytes] | int] = field(default_factory=set)
    _page: int | None = None
    _stalled: str = ""

    def __post_init__(self) -> None:
        self.transcript = Transcript(self.rank)

    def restart(self) -> dict[str, str]:
        """Begins anew, for a rank that will be started; returns the variable of its page, if the system has such."""
        self.release()
        self.transcript = Transcript(self.rank)
        if self._page is not None:
            os.close(self._page)
        self._page = None
        if not hasattr(os, "memfd_create"):  # not on macOS
            return {}
        try:
            page = os.memfd_create("choros progress", 0)
            os.ftruncate(page, PAGE_BYTES)
        except OSError:
            return {}
        self._page = page
        return {PROGRESS_FD: str(page)}

    def add(self, name: str, pipe: IO[bytes] | int) -> None:
        """Reads ``pipe``, which ``transcript.py`` calls ``name``, from now on."""
        self._pipes.add(pipe)
        self.loop.on_readable(pipe, partial(self._read, name, pipe))

    def drain(self) -> None:
        """Reads the rest of the pipes, whose writers have ended."""
        self.loop.run(until=lambda: not self._pipes, seconds=1.0)

    def release(self) -> None:
        """Sends the traceback that is held back, which is not the rank's last word."""
        self._send_all(self.transcript.release())

    def _read(self, name: str, pipe: IO[bytes] | int) -> None:
        data = os.read(pipe if isinstance(pipe, int) else pipe.fileno(), _PIPE_READ)
        if not data:
            self.loop.forget(pipe)
            self._pipes.discard(pipe)
        elif len(data) < _SMALL_READ:
            self.loop.forget(pipe)
            read_on = partial(self.loop.on_readable, pipe, partial(self._read, name, pipe))
            self.loop.set_deadline(f"read {name}", durations.BATCH, read_on)
        self._send_all(self.transcript.feed(name, data, time.monotonic()))
        self._plan_due()

    def _plan_due(self) -> None:
        self.loop.set_deadline("due", min(self.transcript.waits(time.monotonic()), default=None), self._send_due)

    def _send_due(self) -> None:
        if self.is_alive():  # the last output of a rank that has ended is part of its report
            self._send_all(self.transcript.due(time.monotonic()))
            self._plan_due()

    def _send_all(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self.send(frame)

    def note_end(self) -> None:
        """Tells the rank that the whole job is asked to end."""
        if self._page is not None:
            note_end(self._page)

    def send_progress(self, pid: int) -> None:
        """Sends what the rank, process ``pid``, has written to its page, if it has, and how much memory it has."""
        done = self._done()
        if done.last:
            self.send(replace(done, memory=resident_bytes(pid) or 0))

    def watch_data(self, stall: float, *, repeat: bool = False) -> None:
        """Reports, from now on, that a collective's data move for over ``stall`` s; with ``repeat`` more than once."""
        if not stall or not self.is_alive():
            return
        done = self._done()
        seconds = done.ago
        moves = done.moves and done.last_size > 1
        stalled = done.last if moves and seconds >= stall else ""
        for kind, call in ((Kind.WAITED, self._stalled), (Kind.WAITING, stalled)):
            if call and (self._stalled != stalled or (kind is Kind.WAITING and repeat)):
                event = Event(kind, call, self.rank, time.time(), {"seconds": seconds, "matched": done.last_size})
                self.send(Written(self.rank, EVENTS, event.to_json().encode()))
        self._stalled = stalled
        after = stall - seconds if moves and not stalled else stall / 2
        look = partial(self.watch_data, stall, repeat=repeat)
        self.loop.set_deadline("data", min(max(after, 0.1), stall / 2), look)

    def _done(self) -> RankProgress:
        if self._page is None:
            return RankProgress(self.rank)
        return read_page(os.pread(self._page, PAGE_BYTES, 0), self.rank)
