"""The processes of a contender: starts them, sends them orders, and ends them."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, final

import psutil

from choros import durations
from choros.bench.channel import ADDRESS, BARRIER_BYTES, COORDINATOR, KEY
from choros.bench.contender import SAFE, Contender, ContenderFailed, LaunchCommand
from choros.bench.figures import Trial, trial_of
from choros.launch.processes import process_tree
from choros.transport.channel import Channel, ChannelClosed, Listener
from choros.transport.secret import Key

_REASON_LENGTH = 300


@final
class ProcessGroup:
    """A contender's running processes, in a private directory; the end of the ``with`` block ends them in any state."""

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

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(graceful=kind is None)

    def start(self) -> None:
        """Starts the processes, or raises ``ContenderFailed``; returns when all have joined their job."""
        self.contender.check_installed()
        key = Key(secrets.token_bytes(32))
        deadline = time.monotonic() + durations.BENCH_START
        address = f"unix:{self._directory / 'socket'}"
        arrived: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        listener = Listener(address, key, COORDINATOR, lambda channel, _hello: arrived.put(channel))
        try:
            self._spawn({ADDRESS: address, KEY: key.secret.hex()})
            while len(self._channels) < self._size:
                try:
                    self._channels.append(arrived.get(timeout=durations.BENCH_LOOK))
                except queue.Empty:
                    self._check(deadline)
        finally:
            listener.close()
        barrier = self._directory / "barrier"
        barrier.write_bytes(bytes(BARRIER_BYTES * self._size))
        self._send((barrier, rank, self._size) for rank in range(self._size))
        self._answers(durations.BENCH_START)
        self._record_process_tree()

    def run(self, case: Any, runs: int, units: int) -> Trial:
        """Runs one trial, or raises ``ContenderFailed``: each process does ``runs`` runs of ``units`` of ``case``."""
        self._send([(case, runs, units)] * self._size)
        return trial_of(self._answers(durations.BENCH_ANSWER), units)

    def request_stop(self) -> None:
        """Asks the processes to end, without waiting for them."""
        for channel in self._channels:
            with contextlib.suppress(ChannelClosed):  # it has ended already
                channel.send(None)

    def stop(self, *, graceful: bool = True) -> None:
        """Ends the processes: asks them to end if ``graceful``, and kills those that remain."""
        if graceful:
            self.request_stop()
            self._wait(durations.BENCH_GRACE)
        for channel in self._channels:
            channel.close()
        self._record_process_tree()
        for started in self._started:
            started.terminate()  # a launcher ends its ranks
        self._wait(durations.BENCH_CLEANUP)
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
                        [sys.executable, process_tree.__file__, str(os.getpid()), *_with_path(command.argv)],
                        env={**os.environ, **SAFE, **self.contender.environ, **command.environ, **private},
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
        answers: dict[Channel, Any] = {}
        while left := [channel for channel in self._channels if channel not in answers]:
            ready = wait([channel.fileno() for channel in left], durations.BENCH_LOOK)
            if not ready:
                self._check(deadline)
            for channel in left:
                if channel.fileno() in ready:
                    answers[channel] = self._answer(channel)
        return [answers[channel] for channel in self._channels]

    def _answer(self, channel: Channel) -> Any:
        try:
            answer = channel.receive()
        except ChannelClosed as error:
            raise ContenderFailed(self._reason_of_exit()) from error
        if isinstance(answer, str):
            raise ContenderFailed(_shortened(answer))
        return answer

    def _check(self, deadline: float) -> None:
        if any(process.poll() is not None for process in self._started):
            raise ContenderFailed(self._reason_of_exit())
        if time.monotonic() > deadline:
            raise ContenderFailed("its processes did not answer in time")

    def _reason_of_exit(self) -> str:
        self._wait(1.0)
        codes = {process.poll() for process in self._started}
        return _reason_in(self._log.read_bytes(), f"exit codes {sorted(map(str, codes))}")

    def _record_process_tree(self) -> None:
        """Records the descendants of the processes: when a launcher dies, its ranks cannot be found otherwise."""
        for started in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(started.pid)
                self._process_tree |= {process, *process.children(recursive=True)}

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


def run_to_end(command: LaunchCommand, seconds: float | None = None) -> None:
    """Runs ``command``, which ends with this process; raises ``ContenderFailed`` if it fails, or lasts longer."""
    with tempfile.TemporaryFile() as output:
        try:
            started = subprocess.Popen(
                command.argv,
                env={**os.environ, **command.environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=partial(process_tree.die_with_parent, os.getpid()),
            )
            try:
                started.wait(seconds)
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.terminate()  # a launcher ends its ranks
                    started.wait(durations.BENCH_CLEANUP)
                process_tree.signal_group(started.pid, signal.SIGKILL)  # what a script has started, too
                started.wait()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ContenderFailed(str(error)) from error
        output.seek(0)
        if started.returncode != 0:
            raise ContenderFailed(_reason_in(output.read(), f"exit code {started.returncode}"))


def _reason_in(output: bytes, codes: str) -> str:
    """Returns why a process has ended: its last line of output with "error", or else the last line."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    of_errors = [line for line in lines if "rror" in line]
    return _shortened((of_errors or lines or [f"ended with {codes} and without output"])[-1])


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_LENGTH else f"{text[:_REASON_LENGTH]}…"
