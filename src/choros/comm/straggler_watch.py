"""Stragglers of a job that chorosrun does not watch: the ranks send rank 0 their steps, and it names the slow ones.

::

    each rank    once a minute ── "steps R", at its end ── "last steps R" ──► store of rank 0
    rank 0       once a minute, and when all have written their last: compares them ──► a sentence in the log
"""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, final

from choros.comm.stall_watch import answer_of, ranks_text
from choros.observe.progress import page, read_page
from choros.observe.stragglers import RankSteps, Stragglers

if TYPE_CHECKING:
    from choros.comm.store import RendezvousStore

__all__ = ["StragglerWatch"]

_PERIOD_SECONDS = 60.0
#: All ranks end at once.
_END_SECONDS = 0.8

_log = logging.getLogger("choros")


@final
class StragglerWatch:
    """Compares the ranks until ``stop``, when the process ends; they may have left and joined in between.

    Args:
        store: the store of all ranks.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, store: RendezvousStore, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._stragglers = Stragglers(size, ranks_text)
        self._read: list[bytes | None] = [None] * size
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="choros: stragglers", daemon=True).start()

    def stop(self) -> None:
        """Ends; all ranks call it."""
        self._ended.set()
        if not self._own().steps:
            return
        answer_of(lambda: self._send("last steps"))
        if self._rank == 0:
            answer_of(lambda: self._store.wait(self._keys("last steps"), timedelta(seconds=_END_SECONDS)))
            self._log_sentence(self._compare("last steps") or self._stragglers.of_job())

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_SECONDS):
            answer_of(lambda: self._send("steps"))
            if self._rank == 0:
                self._log_sentence(self._compare("steps"))

    def _own(self) -> RankSteps:
        done = read_page(page.memory)
        return RankSteps(self._rank, done.steps, done.prompt_steps, done.seconds, done.waiting, done.loading)

    def _keys(self, name: str) -> list[str]:
        return [f"{name} {rank}" for rank in range(len(self._read))]

    def _send(self, name: str) -> None:
        self._store.set(f"{name} {self._rank}", json.dumps(asdict(self._own())))

    def _compare(self, name: str) -> str:
        """Reads the steps of all ranks; returns a sentence if there are new stragglers."""
        values = answer_of(lambda: self._store.get_all(self._keys(name))) or self._read
        sentences = [
            self._stragglers.note(RankSteps(**json.loads(new)))
            for old, new in zip(self._read, values, strict=True)
            if new is not None and new != old
        ]
        self._read = values
        return "".join(sentences)

    def _log_sentence(self, sentence: str) -> None:
        if sentence:
            _log.warning("%s.", sentence)
