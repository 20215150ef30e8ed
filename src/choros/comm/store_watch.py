"""Ranks that chorosrun does not watch. Stalls: those that wait say themselves who is missing. Hosts and processes
are known from the start, so they are named even if rank 0's store does not answer. Stacks are of the same host::

    rank 0   waits for a second ── "waits 0" = allreduce ──► store of rank 0
    rank 2   the same ─────────── "waits 2" = allreduce ──►        │
    rank 1   is stopped                                           ▼
             after CHOROS_STALL_SECONDS, rank 0, the first of those that wait, logs one report: rank 1 is missing

Stragglers: the ranks send rank 0 their steps, and it names the slow ones::

    each rank    once a minute ── "steps R", at its end ── "last steps R" ──► store of rank 0
    rank 0       once a minute, and when all have written their last: compares them ──► a sentence in the log
"""

from __future__ import annotations

import json
import logging
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

from choros import durations
from choros.errors import ChorosError
from choros.observe import events
from choros.observe.events import Event, Kind
from choros.observe.processes import state_of, take_stacks
from choros.observe.progress import RankProgress, page, read_page
from choros.observe.verdict import Stragglers, last_lines
from choros.observe.waits import SameCall, Wait, Waits
from choros.settings import current
from choros.transport.address import Location, this_host
from choros.wording import ranks_text

if TYPE_CHECKING:
    from choros.comm.store import RendezvousStore


T = TypeVar("T")

_log = logging.getLogger("choros")


@final
class StallWatch:
    """Watches this rank's waits, and reports those of ``seconds``; all ranks are numbered as the launcher does."""

    def __init__(self, store: RendezvousStore, rank: int, seconds: float, locations: Sequence[Location]) -> None:
        self._store = store
        self._rank = rank
        self._seconds = max(seconds, durations.WAITS_WRITTEN)
        self._locations = locations
        self._waits = Waits(len(locations), stall_seconds=self._seconds)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop_listening = events.listen(self._note, (Kind.WAITING, Kind.WAITED))

    def stop(self) -> None:
        """Ends."""
        self._stop_listening()
        with self._changed:
            self._waits = Waits(0)

    def _note(self, event: Event) -> None:
        with self._changed:
            self._waits.note(self._rank, event, event.time)
            if self._thread is None and event.kind is Kind.WAITING:
                self._thread = threading.Thread(target=self._watch, name="choros: stalls", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        """Tells the other ranks the waits of this one, and reports those that are too long."""
        sent: Wait | None = None
        while True:
            with self._changed:
                if (wait := self._own()) is sent:
                    due = self._waits.next_stall(time.time())
                    self._changed.wait(due if due is None else max(due, 0.01))
                    wait = self._own()
            if wait is not sent:
                sent = wait
                call = b"" if wait is None else wait.call.encode()
                answer_of(partial(self._store.set, f"waits {self._rank}", call))
            if wait is not None and not wait.shown and time.time() >= wait.since + self._seconds:
                self._report(wait)

    def _own(self) -> Wait | None:
        return self._waits.current().get(self._rank)

    def _report(self, wait: Wait) -> None:
        """Logs a report, if this is the first of the ranks that wait."""
        ranks = sorted(wait.ranks)
        calls = answer_of(lambda: self._store.get_all([f"waits {rank}" for rank in ranks]))
        if calls is None:  # the others are taken to have come now
            here, since, unknown = {*ranks} - {0}, time.time(), " The others ask rank 0 for whom they wait."
        else:
            by_rank = zip(ranks, calls, strict=True)
            here, since, unknown = {rank for rank, call in by_rank if call == wait.call.encode()}, wait.since, ""
        with self._changed:
            wait.shown = True
            if wait is not self._own():
                return
        waits = {rank: replace(wait, since=since) for rank in sorted(here | {self._rank})} | {self._rank: wait}
        call = SameCall(waits, wait.ranks - waits.keys())
        if call.missing and (calls is None or self._rank == min(waits)):
            stall, last = call.stall(ranks_text, time.time(), self._seconds), read_page(page.memory)
            what = f" All have made {last.last}, {last.ago:.0f} s ago." if last.last else ""
            clock = time.strftime("%H:%M:%S", time.localtime(stall.since))
            parts = [f"{stall.text}, since {clock}.{what}{unknown}"]
            parts += [textwrap.indent(self._describe(rank), "  ") for rank in stall.missing[:8]]
            _log.warning("%s", "\n".join(parts))

    def _describe(self, rank: int) -> str:
        process = self._locations[rank]
        head = f"rank {rank} on {process.name}, PID {process.pid}"
        if process.host != this_host():
            return f"{head} (its stack: py-spy dump --pid {process.pid} on that host)"
        state = state_of(process.pid)
        resume = f": kill -CONT {process.pid} continues it" if "by a signal" in state else ""
        return f"{head} {state}{resume}\n{textwrap.indent(take_stacks(process.pid), '  ')}"


@final
class StragglerWatch:
    """Compares the ranks until ``stop``, when the process ends; they may have left and joined in between."""

    def __init__(self, store: RendezvousStore, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._stragglers = Stragglers(size, ranks_text)
        self._read: list[bytes | None] = [None] * size
        self._began = time.time()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="choros: stragglers", daemon=True).start()

    def stop(self) -> None:
        """Ends; all ranks call it."""
        self._ended.set()
        if not read_page(page.memory).steps:
            return
        answer_of(lambda: self._send("last steps"))
        if self._rank == 0:
            answer_of(self._wait_for_last_steps)
            self._compare("last steps")
            for line in last_lines(self._stragglers, self._began, time.time(), verdict=current().verdict):
                _log.warning("%s", line)

    def _watch(self) -> None:
        while not self._ended.wait(durations.STRAGGLERS):
            answer_of(lambda: self._send("steps"))
            if self._rank == 0:
                sentence = self._compare("steps")
                if sentence:
                    _log.warning("%s.", sentence)

    def _wait_for_last_steps(self) -> None:
        """Not by the store's own wait, which ends when a rank does: the others' last steps may come after that."""
        end = time.monotonic() + durations.STRAGGLERS_END
        while None in self._store.get_all(self._keys("last steps")) and time.monotonic() < end:
            time.sleep(durations.STORE_LOOK)

    def _keys(self, name: str) -> list[str]:
        return [f"{name} {rank}" for rank in range(len(self._read))]

    def _send(self, name: str) -> None:
        self._store.set(f"{name} {self._rank}", json.dumps(asdict(read_page(page.memory, self._rank))))

    def _compare(self, name: str) -> str:
        """Reads the steps of all ranks; returns a sentence if there are new stragglers."""
        values = answer_of(lambda: self._store.get_all(self._keys(name))) or self._read
        sentences = [
            self._stragglers.note(RankProgress(**json.loads(new)))
            for old, new in zip(self._read, values, strict=True)
            if new is not None and new != old
        ]
        self._read = values
        return "".join(sentences)


def answer_of(ask: Callable[[], T]) -> T | None:
    """What ``ask``, a question to the store, returns; ``None`` if rank 0 does not answer, or is lost."""
    answers: list[T] = []

    def run() -> None:
        with suppress(ChorosError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(durations.ANSWER)
    return answers[0] if answers else None
