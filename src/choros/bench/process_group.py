"""The processes of a contender: starts them, sends them orders, and ends them."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, final

import psutil

from choros.bench.channel import ADDRESS, COORDINATOR, KEY, Barrier, Failed, Order, Ready, Stop, Timing, Welcome
from choros.bench.contender import Contender
from choros.bench.figures import Trial, trial_of
from choros.launch.processes import parent_death_guard
from choros.transport.channel import Channel, ChannelClosed
from choros.transport.listener import Listener
from choros.transport.loop import Loop
from choros.transport.secret import Key

__all__ = ["ContenderFailed", "ProcessGroup"]

_POLL_SECONDS = 0.25
_START_SECONDS = 240.0
_ANSWER_SECONDS = 600.0
_GRACE_SECONDS = 5.0
_CLEANUP_SECONDS = 2.0
_REASON_LENGTH = 300


class ContenderFailed(Exception):
    """A contender could not be started, or failed to run an order; the message gives the reason."""


@final
class ProcessGroup:
    """The running processes of a contender. Leaving the ``with`` block ends them in any state.

    Args:
        contender: the contender.
        ranks: its number of ranks.
        directory: an empty directory that only this user can enter.
    """

    def __init__(self, contender: Contender, ranks: int, directory: Path) -> None:
        self.contender = contender
        self._size = 1 if contender.single else ranks
        self._ranks = ranks
        self._directory = directory
        self._log = directory / "output"
        self._started: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._process_tree: set[psutil.Process] = set()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(graceful=kind is None)

    def start(self) -> None:
        """Starts the processes; returns when all have joined their job.

        Raises:
            ContenderFailed: it is not installed or does not start.
        """
        if self.contender.missing:
            raise ContenderFailed(f"not installed ({', '.join(self.contender.missing)})")
        key = Key(secrets.token_bytes(32))
        deadline = time.monotonic() + _START_SECONDS
        address = f"unix:{self._directory / 'socket'}"
        arrived: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        listener = Listener(address, key, COORDINATOR, lambda channel, _hello: arrived.put(channel))
        try:
            self._spawn({ADDRESS: address, KEY: key.secret.hex()})
            while len(self._channels) < self._size:
                try:
                    self._channels.append(arrived.get(timeout=_POLL_SECONDS))
                except queue.Empty:
                    self._check(deadline)
        finally:
            listener.close()
        barrier = self._directory / "barrier"
        barrier.write_bytes(bytes(Barrier.size(self._size)))
        self._send(Welcome(rank, self._size, str(barrier)) for rank in range(self._size))
        for answer in self._answers(_START_SECONDS):
            if not isinstance(answer, Ready):
                raise ContenderFailed(f"a process answered {answer!r}; expected Ready()")
        self._record_process_tree()

    def run(self, case: Any, runs: int, units: int) -> Trial:
        """Runs one trial: every process does ``runs`` runs of ``units`` units of ``case``.

        Raises:
            ContenderFailed: a process failed.
        """
        self._send([Order(case, runs, units)] * self._size)
        timings = [answer for answer in self._answers(_ANSWER_SECONDS) if isinstance(answer, Timing)]
        return trial_of(timings, units)

    def request_stop(self) -> None:
        """Asks the processes to end, without waiting for them."""
        for channel in self._channels:
            with contextlib.suppress(ChannelClosed):  # it has ended already
                channel.send(Stop())

    def stop(self, *, graceful: bool = True) -> None:
        """Ends the processes: asks them to end if ``graceful``, and kills those that remain."""
        if graceful:
            self.request_stop()
            self._wait(_GRACE_SECONDS)
        for channel in self._channels:
            channel.close()
        self._record_process_tree()
        for started in self._started:
            started.terminate()  # a launcher ends its ranks
        self._wait(_CLEANUP_SECONDS)
        for process in self._process_tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._process_tree, timeout=1.0)
        for started in self._started:
            started.wait()
        self._started, self._channels, self._process_tree = [], [], set()

    def _spawn(self, private: dict[str, str]) -> None:
        """Starts the commands under a parent-death guard: they are killed when this process dies."""
        with self._log.open("ab") as log:
            for command in self.contender.start(self._ranks, self.contender.argv):
                self._started.append(
                    subprocess.Popen(
                        [sys.executable, parent_death_guard.__file__, str(os.getpid()), *_with_path(command.argv)],
                        env={**os.environ, **self.contender.environ, **command.environ, **private},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C reaches only the coordinator, which ends them
                    )
                )

    def _send(self, messages: Iterable[object]) -> None:
        for channel, message in zip(self._channels, messages, strict=True):
            try:
                channel.send(message)
            except ChannelClosed as error:
                raise ContenderFailed(self._reason_of_exit()) from error

    def _answers(self, seconds: float) -> list[Any]:
        """Returns the answer of each process; raises for the first that fails."""
        deadline = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        loop = Loop(_POLL_SECONDS)
        loop.repeat("check", _POLL_SECONDS, lambda: self._check(deadline))
        for rank, channel in enumerate(self._channels):
            loop.on_readable(channel, partial(self._receive, rank, loop, answers))
        try:
            loop.run(until=lambda: len(answers) == len(self._channels))
        finally:
            loop.close()
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int, loop: Loop, answers: dict[int, Any]) -> None:
        channel = self._channels[rank]
        loop.forget(channel)
        try:
            answers[rank] = channel.receive()
        except ChannelClosed as error:
            raise ContenderFailed(self._reason_of_exit()) from error
        if isinstance(answers[rank], Failed):
            raise ContenderFailed(_shortened(answers[rank].reason))

    def _check(self, deadline: float) -> None:
        if any(process.poll() is not None for process in self._started):
            raise ContenderFailed(self._reason_of_exit())
        if time.monotonic() > deadline:
            raise ContenderFailed("its processes did not answer in time")

    def _reason_of_exit(self) -> str:
        """Returns why a process ended: the last line of output with "error", or else the last line."""
        self._wait(1.0)
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        of_errors = [line for line in lines if "rror" in line]
        codes = {process.poll() for process in self._started}
        return _shortened(
            (of_errors or lines or [f"ended with exit codes {sorted(map(str, codes))} and without output"])[-1]
        )

    def _record_process_tree(self) -> None:
        """Records the descendants of the processes: when a launcher dies, its ranks cannot be found otherwise."""
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process_tree |= {
                    psutil.Process(process.pid),
                    *psutil.Process(process.pid).children(recursive=True),
                }

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self._started) and time.monotonic() < deadline:
            time.sleep(0.02)


def _with_path(argv: Sequence[str]) -> list[str]:
    """Returns ``argv`` with the program's full path, which the parent-death guard requires."""
    path = shutil.which(argv[0])
    if path is None:
        raise ContenderFailed(f"command not found: {argv[0]!r}")
    return [path, *argv[1:]]


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_LENGTH else f"{text[:_REASON_LENGTH]}…"
