"""Stalls of ranks that chorosrun does not watch: those that wait say themselves who is missing.

::

    rank 0   waits for a second ── "waits 0" = allreduce ──► store of rank 0
    rank 2   the same ─────────── "waits 2" = allreduce ──►        │
    rank 1   is stopped                                           ▼
             after CHOROS_STALL_SECONDS, rank 0, the first of those that wait, logs one report: rank 1 is missing

The host and the process of every rank are known from the start, so they are named even if rank 0, and with it the
store, does not answer. Stacks are those of ranks on the same host as the one that reports.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

from choros.errors import ChorosError
from choros.observe import events
from choros.observe.events import Event, Kind
from choros.observe.progress import page, read_page
from choros.observe.stacks import state_of, take_stacks
from choros.transport.address import this_host

if TYPE_CHECKING:
    from choros.comm.store import RendezvousStore

__all__ = ["StallWatch", "answer_of", "ranks_text"]

#: Rank 0 answers in less, unless it is stopped.
_ANSWER_SECONDS = 1.0
#: Another rank that waits has written it by then.
_REPORT_SECONDS = 1.5

T = TypeVar("T")

_log = logging.getLogger("choros")


@dataclass(frozen=True)
class _OwnWait:
    """A wait of this rank."""

    call: str
    ranks: tuple[int, ...]
    at: str
    since: float


@dataclass(frozen=True)
class _Process:
    """The process of a rank."""

    name: str
    host: str
    pid: int


@final
class StallWatch:
    """Watches the waits of this rank from ``start`` to ``stop``.

    Args:
        store: the store of all ranks.
        rank: this rank, as all below in the launcher's numbering.
        seconds: how long a wait is until it is reported.
    """

    def __init__(self, store: RendezvousStore, rank: int, seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._seconds = seconds
        self._processes: list[_Process] = []
        self._waits: dict[str, _OwnWait] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop_listening: Callable[[], None] | None = None
        store.set(f"location of process {rank}", json.dumps([socket.gethostname(), this_host(), os.getpid()]))

    def start(self, size: int) -> None:
        """Begins, when all ranks have made theirs."""
        values = self._store.get_all([f"location of process {rank}" for rank in range(size)])
        self._processes = [_Process(*json.loads(value or b"")) for value in values]
        self._stop_listening = events.listen(self._note, (Kind.WAITING, Kind.WAITED))

    def stop(self) -> None:
        """Ends."""
        if self._stop_listening is not None:
            self._stop_listening()
        with self._changed:
            self._waits.clear()

    def _note(self, event: Event) -> None:
        """Records a wait, in the thread that waits."""
        with self._changed:
            if event.kind is Kind.WAITED:
                self._waits.pop(event.name, None)
            elif event.name not in self._waits:
                ranks, seconds = event.details.get("process_set", ()), event.details.get("seconds", 0.0)
                assert isinstance(ranks, tuple)  # noqa: S101  (as LongWait has made it)
                since = event.time - float(seconds)  # type: ignore[arg-type]
                self._waits[event.name] = _OwnWait(event.name, ranks, str(event.details.get("at", "")), since)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._watch, name="choros: stalls", daemon=True)
                    self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        """Tells the other ranks the waits of this one, and reports those that are too long."""
        sent: _OwnWait | None = None
        reported: _OwnWait | None = None
        while True:
            with self._changed:
                wait = self._innermost()
                if wait is sent:
                    due = None if wait is None or wait is reported else self._due(wait) - time.time()
                    self._changed.wait(due if due is None else max(due, 0.01))
                    wait = self._innermost()
            if wait is not sent:
                sent = wait
                self._tell(wait)
            if wait is not None and wait is not reported and time.time() >= self._due(wait):
                reported = wait
                self._report(wait)

    def _innermost(self) -> _OwnWait | None:
        return next(reversed(self._waits.values()), None)

    def _due(self, wait: _OwnWait) -> float:
        return wait.since + max(self._seconds, _REPORT_SECONDS)

    def _tell(self, wait: _OwnWait | None) -> None:
        answer_of(lambda: self._store.set(f"waits {self._rank}", b"" if wait is None else wait.call.encode()))

    def _report(self, wait: _OwnWait) -> None:
        """Logs a report, if this is the first of the ranks that wait."""
        calls = answer_of(lambda: self._store.get_all([f"waits {rank}" for rank in wait.ranks]))
        if calls is None:
            present, missing, unknown = [self._rank], [0], " The others ask rank 0 for whom they wait."
        else:
            by_rank = dict(zip(wait.ranks, calls, strict=True))
            present = [rank for rank, call in by_rank.items() if rank == self._rank or call == wait.call.encode()]
            missing, unknown = [rank for rank in wait.ranks if rank not in present], ""
        if self._rank != min(present) or not missing or wait is not self._innermost():
            return
        at = f" at {wait.at}" if wait.at else ""
        since = time.strftime("%H:%M:%S", time.localtime(wait.since))
        last = read_page(page.memory)
        what = f" All have made {last.last}, {time.time() - last.last_time:.0f} s ago." if last.last else ""
        parts = [
            f"{ranks_text(present)} {'has' if len(present) == 1 else 'have'} waited {time.time() - wait.since:.0f} s "
            f"for {ranks_text(missing)} in {wait.call}{at}, since {since}.{what}{unknown}"
        ]
        parts += [textwrap.indent(self._describe(rank), "  ") for rank in missing[:8]]
        _log.warning("%s", "\n".join(parts))

    def _describe(self, rank: int) -> str:
        process = self._processes[rank]
        head = f"rank {rank} on {process.name}, PID {process.pid}"
        if process.host != this_host():
            return f"{head} (its stack: py-spy dump --pid {process.pid} on that host)"
        state = state_of(process.pid)
        resume = f": kill -CONT {process.pid} continues it" if "by a signal" in state else ""
        return f"{head} {state}{resume}\n{textwrap.indent(take_stacks(process.pid), '  ')}"


def answer_of(ask: Callable[[], T]) -> T | None:
    """What ``ask``, a question to the store, returns; ``None`` if rank 0 does not answer, or is lost."""
    answers: list[T] = []

    def run() -> None:
        with suppress(ChorosError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answers[0] if answers else None


def ranks_text(ranks: Sequence[int]) -> str:
    """The names of some ranks.

    Example:
        >>> ranks_text([1]), ranks_text([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"
