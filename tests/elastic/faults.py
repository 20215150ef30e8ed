"""Faults of ranks at chosen moments: ``1@5,2@validation:2,any@commit:1`` kills three, by SIGKILL.

====================  =============================================================================
``RANK@N``            before the rank's step N; the first is 0
``@ended:N``          after the rank's step N, before its next call
``@validation:N``     before its batch N of validation
``@primitive:N``      before its call N of the engine: within a collective, or before its end is settled
``@bucket:N``         before it reduces bucket N of gradients, counted over all steps, after ranks have agreed on it
``@broadcast:N``      before it sends or receives broadcast N: those of the first weights come first
``@recovery:N``       when it notices the loss N of others, before it becomes a member of those that are left
``@shrunk:N``         when those that are left have met, and make what belongs to them
``@change:N``         when it is told how the ranks have changed for the time N
``@checkpoint:N``     when the file N of ``ModelCheckpoint`` is written, but has not its name
``@commit:N``         likewise the commit N
====================  =============================================================================

RANK is the rank's number at the start, or ``any``: the first one that comes to that moment. ``1@5=SIGTERM`` sends
another signal, and ``1@5=SIGTERM!`` sends it to chorosrun.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
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

_FAULT = re.compile(r"(?P<rank>\d+|any)@((?P<moment>\w+):)?(?P<count>\d+)(=(?P<signal>\w+)(?P<to_job>!?))?")
#: Files whose names contain the text belong to the moment.
_FILES = {"commit-": "commit", "checkpoint": "checkpoint"}
_PRIMITIVES = ("_exchange", "_allreduce", "_allgather", "_broadcast", "_settle")


@dataclass(frozen=True)
class Fault:
    """A signal to one rank, or to chorosrun.

    Attributes:
        text: as it is written.
        rank: the rank; ``None``: any.
        moment: see above.
        count: it is sent when the rank comes to the moment for the time ``count``, from 0 on.
        signal: the signal.
        to_job: whether it is sent to chorosrun.
    """

    text: str
    rank: int | None
    moment: str
    count: int
    signal: signal.Signals
    to_job: bool

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = _FAULT.fullmatch(text)
        assert match, text
        rank = None if match["rank"] == "any" else int(match["rank"])
        number = signal.Signals[match["signal"] or "SIGKILL"]
        return cls(text, rank, match["moment"] or "step", int(match["count"]), number, bool(match["to_job"]))


class Faults:
    """Sends this rank's signals at their moments.

    Args:
        text: the faults.
        communicator: that of all ranks.
        directory: in which ranks mark that one of them, which may be any, has come to its moment.
    """

    def __init__(self, text: str, communicator: Communicator, directory: Path | None = None) -> None:
        faults = [Fault.parse(each) for each in text.split(",") if each]
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
                target = (
                    psutil.Process().parents()[2].pid if fault.to_job else os.getpid()
                )  # wrapper, mpirun, chorosrun
                os.kill(target, fault.signal)
                # chorosrun asks this rank by a signal, which must come in this step. It may have come already, so that
                # signal.pause() would not end.
                while fault.to_job and fault.signal != signal.SIGKILL and not self._communicator.notice:
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
