"""Faults of ranks at chosen moments: ``1@5,2@validation:2,any@commit:1`` kills three, by SIGKILL.

====================  =============================================================================
``RANK@N``            before the rank's step N; the first is 0
``@ended:N``          after the rank's step N, before its next call
``@validation:N``     before its batch N of validation
``@primitive:N``      before its call N of the engine: within a collective, or before its end is settled; of sums of
                      16 KiB and more together with others, which are in shared memory, none
``@bucket:N``         before it reduces bucket N of gradients, counted over all steps, after ranks have agreed on it
``@broadcast:N``      before it sends or receives broadcast N: those of the first weights come first
``@recovery:N``       when it notices the loss N of others, before it becomes a member of those that are left
``@shrunk:N``         when those that are left have met, and make what belongs to them
``@change:N``         when it is told how the ranks have changed for the time N
``@checkpoint:N``     when the file N of ``ModelCheckpoint`` is written, but has not its name
``@commit:N``         likewise the commit N
``@joined:N``         when it takes in new rank N
====================  =============================================================================

RANK is the rank's number at the start, or ``any``: the first one that comes to that moment. ``1@5=SIGTERM`` sends
another signal, ``1@5=SIGTERM!`` sends it to chorosrun, ``1@5=SIGTERM!wrapper`` and ``!mpirun`` to these.
``1@5=FULL:DIRECTORY`` fills a file system, and ``1@5=OUTSIDE`` waits until who has started the job has done what it is
to do: it creates ``come`` in the directory of ``Faults``, and waits for ``done``.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import psutil

import choros
from choros import durable
from choros.comm.communicator import Communicator
from choros.comm.engines import mpi
from choros.observe import events

_FAULT = re.compile(r"(?P<rank>\d+|any)@((?P<moment>\w+):)?(?P<count>\d+)(=(?P<what>[\w:/.-]+)(?P<to>!(\w*))?)?")
#: Files whose names contain the text belong to the moment.
_FILES = {"commit-": "commit", "checkpoint": "checkpoint"}
_PRIMITIVES = ("_exchange", "_allreduce_anywhere", "_allgather", "_broadcast", "_settle")


def process_above(name: str) -> int:
    """The number of this rank's ``wrapper``, of ``mpirun`` or of ``chorosrun``."""
    started = psutil.Process(int(os.environ.get("CHOROS_TEST_CLIENT", os.getpid())))  # by the wrapper
    return started.parents()[("wrapper", "mpirun", "chorosrun").index(name)].pid


@dataclass(frozen=True)
class Fault:
    """A signal to one rank, or to another process of the job, or something else that goes wrong.

    Attributes:
        text: as it is written.
        rank: the rank; ``None``: any.
        moment: see above.
        count: it is sent when the rank comes to the moment for the time ``count``, from 0 on.
        what: the name of the signal, or what else happens.
        to: the process that gets it.
    """

    text: str
    rank: int | None
    moment: str
    count: int
    what: str
    to: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = _FAULT.fullmatch(text)
        assert match, text
        rank = None if match["rank"] == "any" else int(match["rank"])
        to = {None: "rank", "!": "chorosrun"}.get(match["to"], (match["to"] or "")[1:])
        return cls(text, rank, match["moment"] or "step", int(match["count"]), match["what"] or "SIGKILL", to)


class Faults:
    """Sends this rank's signals at their moments; a new rank, or one that was started again, has none.

    Args:
        text: the faults.
        communicator: that of all ranks.
        directory: in which ranks mark that one of them, which may be any, has come to its moment.
    """

    def __init__(self, text: str, communicator: Communicator, directory: Path | None = None) -> None:
        is_later = communicator.is_new or "CHOROS_RESTARTS" in os.environ
        faults = [] if is_later else [Fault.parse(each) for each in text.split(",") if each]
        self._own = [fault for fault in faults if fault.rank in (None, communicator.rank)]
        self._counts: Counter[str] = Counter()
        self._directory = directory
        self._communicator = communicator
        for name in _PRIMITIVES:
            self._precede(communicator, name, "primitive")
        self._precede(communicator, "_broadcast", "broadcast")
        self._precede(communicator, "_recover", "recovery")
        events.listen(lambda _: self.come("bucket"), [events.Kind.BUCKET_BEGUN])
        shrunk = mpi.shrunk
        mpi.shrunk = lambda comm, make: shrunk(comm, lambda new: self.come("shrunk") or make(new))
        joined = mpi.joined
        mpi.joined = lambda *args, **how: self.come("joined") or joined(*args, **how)
        replace = durable.replace
        durable.replace = lambda new, final: self._come_to_file(final) or replace(new, final)
        choros.comm.on_change(lambda _: self.come("change"))

    def callback(self) -> keras.callbacks.Callback:
        """The callback of ``fit`` for steps and batches of validation."""
        return keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: self.come("step"),
            on_train_batch_end=lambda batch, logs: self.come("ended"),
            on_test_batch_begin=lambda batch, logs: self.come("validation"),
        )

    def come(self, moment: str) -> None:
        """Notes that this rank has come to ``moment`` once more."""
        count = self._counts[moment]
        self._counts[moment] += 1
        for fault in self._own:
            if (fault.moment, fault.count) == (moment, count) and (fault.rank is not None or self._is_first(fault)):
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        if fault.what == "OUTSIDE":
            assert self._directory is not None
            (self._directory / "come").touch()
            while not (self._directory / "done").exists():
                time.sleep(0.01)
            return
        if fault.what.startswith("FULL:"):
            with open(Path(fault.what.removeprefix("FULL:")) / "full", "wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 12))
            return
        number = signal.Signals[fault.what]
        above = fault.to != "rank"
        os.kill(process_above(fault.to) if above else os.getpid(), number)
        # The signal must have come to this rank in this step. It may have come already, so that signal.pause() would
        # not end.
        while above and number not in (signal.SIGKILL, signal.SIGSTOP) and not self._communicator.notice:
            time.sleep(0.01)
        while above and number == signal.SIGKILL and fault.to != "chorosrun":  # it dies with the other process
            time.sleep(0.01)

    def _precede(self, communicator: Communicator, name: str, moment: str) -> None:
        method: Callable[..., Any] = getattr(communicator, name)

        def preceded(*args: Any, **kwargs: Any) -> Any:
            self.come(moment)
            return method(*args, **kwargs)

        setattr(communicator, name, preceded)

    def _come_to_file(self, path: Path) -> None:
        for text, moment in _FILES.items():
            if text in path.name:
                self.come(moment)

    def _is_first(self, fault: Fault) -> bool:
        assert self._directory is not None
        try:
            (self._directory / f"come-{fault.text}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
