"""The program beside the first task of each machine: ``python -m choros.spark.host``, its task on standard input. On
the first machine it is what ``choros.run`` is elsewhere; on the others it is the agent of ``launch/agents``. It ends
its ranks, and itself, when its input ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from typing import IO, Any, NoReturn, final

import cloudpickle

from choros import durations
from choros.errors import ChorosError, LaunchError
from choros.launch.agents.agent import serve_host
from choros.launch.agents.hub import Hub
from choros.launch.plan.arguments import Arguments
from choros.launch.processes.process_tree import CHILD_SUBREAPER, end_children, set_option
from choros.launch.run import run_call
from choros.settings import VARIABLES
from choros.spark.messages import DRIVER, Listening, Printed, Printings, Returned, Started
from choros.spark.own_machine import RankCall
from choros.spark.plan import HostTask
from choros.topology.clusters import ClusterHost
from choros.transport.channel import Channel, ChannelClosed, connect
from choros.transport.secret import job_key

_NAME = "Spark"


def main() -> None:
    """Does the task that comes on standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the pipe is for messages only
    task: HostTask = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the process that started this one)
    set_option(CHILD_SUBREAPER, 1)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    os.environ[VARIABLES["secret"].name] = task.job.secret
    own = task.machines[task.index]
    with tempfile.TemporaryDirectory(prefix="choros-", dir=own.directory) as scratch:
        machines = tuple(replace(each, directory=scratch) if each is own else each for each in task.machines)
        task = replace(task, machines=machines)
        if task.index == 0:
            _answer(answers, _run(task, partial(_answer, answers)))
        else:
            _serve(task)
            _answer(answers, Returned(b""))


def _end_with(stdin: IO[bytes]) -> None:
    """Ends the ranks, and this process, at once when the task does: the next attempt goes on from their last commit."""
    stdin.read()
    _end()


def _end() -> NoReturn:
    end_children()
    os._exit(1)


def _answer(answers: IO[bytes], message: Any) -> None:
    pickle.dump(message, answers)
    answers.flush()


def _show(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _serve(task: HostTask) -> None:
    first = task.machines[0].address
    cluster = ClusterHost(_NAME, task.index, len(task.machines), first, port=task.port)
    serve_host(cluster, len(task.machines[task.index].tasks), task.job.start, os.environ, _show)


def _run(task: HostTask, answer: Callable[[Listening], None]) -> Returned:
    """Runs the job, whose results or failure the driver gets through the task."""
    job = task.job
    try:
        driver = connect(job.driver, job_key(os.environ, [job.driver]), "task 0", DRIVER, durations.CONNECT)
        driver.send(Started(tuple(machine.address for machine in task.machines)))
        driver.receive()
        link = _DriverLink(driver)
        with ExitStack() as stack:
            arguments = _with_hosts(task, answer, stack)
            stack.enter_context(redirect_stdout(link.stream(error=False)))
            stack.enter_context(redirect_stderr(link.stream(error=True)))
            try:
                call = RankCall(job.call, task.machines)
                results = run_call(call, arguments, job.sentences, job.executable)
            finally:
                link.finish()
    except ChorosError as error:
        return Returned(b"", error)
    except OSError as error:
        return Returned(b"", LaunchError(f"{type(error).__name__}: {error}"))
    return Returned(cloudpickle.dumps(results))


def _with_hosts(task: HostTask, answer: Callable[[Listening], None], stack: ExitStack) -> Arguments:
    """Returns the job's arguments with its machines, which are there then; of one machine, mpirun needs no names."""
    machines, arguments = task.machines, task.job.arguments
    if len(machines) == 1:
        answer(Listening(0))
        return arguments
    hub = Hub(ClusterHost(_NAME, 0, len(machines), port=0), len(machines[0].tasks), os.environ)
    stack.callback(hub.close, 0)
    answer(Listening(hub.port))
    hub.wait(None, None, task.job.start, _show)
    return hub.named(arguments)


@final
class _DriverLink:
    """The channel to the driver, in whose end the job ends, too."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._granted = threading.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                self._channel.receive()
                self._granted.set()
        except ChannelClosed:  # the driver has gone, or begun another attempt of the stage
            if not self._granted.is_set():
                _end()

    def stream(self, *, error: bool) -> _DriverStream:
        """Returns a text stream, which the driver shows."""
        return _DriverStream(self._channel, error=error)

    def finish(self) -> None:
        """Waits until the driver has all that ranks have printed."""
        with closing(self._channel):
            self._channel.send(Printings())
            self._granted.wait()


@final
class _DriverStream:
    """What of a text stream is needed for ``redirect_stdout``."""

    def __init__(self, channel: Channel, *, error: bool) -> None:
        self._channel, self._error = channel, error

    def write(self, text: str) -> int:
        """Sends ``text``; what cannot be sent any more is lost, as the job is."""
        with suppress(ChannelClosed):
            self._channel.send(Printed(self._error, text))
        return len(text)

    def flush(self) -> None:
        """Does nothing: each text is sent at once."""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: _end())
    main()
