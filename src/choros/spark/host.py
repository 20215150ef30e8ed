"""The program beside the first task of each machine: ``python -m choros.spark.host``, its task on standard input. On
the first machine it is what ``choros.run`` is elsewhere; on the others it is the agent of ``launch/agents``. It ends
its ranks, and itself, when its input ends.
"""

import os
import pickle
import shutil
import signal
import sys
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
from choros.spark.plan import (
    ALL_PRINTED,
    DRIVER,
    STARTED,
    SUPERSEDED,
    VISIBLE,
    Machine,
    Printed,
    SparkJob,
    run_packed,
)
from choros.topology.clusters import ClusterHost
from choros.transport.channel import Channel, ChannelClosed, connect
from choros.transport.secret import job_key

_AT_ONCE = 1 << 12


def main() -> None:
    """Does what comes on standard input: a job, its machines, which of them this is, and the port of its hub."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the pipe is for messages only
    job, machines, index, port = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the process that started this one)
    set_option(CHILD_SUBREAPER, 1)
    scratch = machines[index].directory
    threading.Thread(target=_end_with_input, args=(scratch,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _end(scratch))
    os.environ[VARIABLES["secret"].name] = job.secret
    os.mkdir(scratch, 0o700)
    try:
        if index == 0:
            returned: Any = _run(job, machines, partial(_answer, answers), partial(_end, scratch))
        else:
            returned = serve_host(_as_host(machines, index, port), job.start)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _answer(answers, cloudpickle.dumps(returned))


def _end_with_input(scratch: str) -> None:
    """Ends the ranks, and this process, at once when the task does: the next attempt goes on from their last commit."""
    while os.read(0, _AT_ONCE):
        pass
    _end(scratch)


def _end(scratch: str) -> NoReturn:
    end_children()
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(1)


def _answer(answers: IO[bytes], message: Any) -> None:
    pickle.dump(message, answers)
    answers.flush()


def _run(
    job: SparkJob, machines: tuple[Machine, ...], answer: Callable[[int], None], end: Callable[[], NoReturn]
) -> list[Any] | ChorosError:
    """Runs the job, whose results the driver gets through the task; ``answer`` gives that the port of its hub."""
    try:
        driver = connect(job.driver, job_key(os.environ, [job.driver]), "task 0", DRIVER, durations.CONNECT)
        driver.send(STARTED)
        driver.receive()
        finish = _follow(driver, end)
        with ExitStack() as stack:
            arguments = _with_hosts(job, machines, answer, stack)
            stack.enter_context(redirect_stdout(_DriverStream(driver, error=False)))
            stack.enter_context(redirect_stderr(_DriverStream(driver, error=True)))
            try:
                call = partial(run_packed, job.call, _visible_to(arguments, machines))
                return run_call(call, arguments, job.sentences, job.executable)
            finally:
                finish()
    except ChorosError as error:
        return error
    except Exception as error:  # noqa: BLE001  (what ranks return may need a module that is not here)
        return LaunchError(f"the job could not be run: {type(error).__name__}: {error}")


def _visible_to(arguments: Arguments, machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
    """The machines with their accelerators, unless the user has said which of them ranks see."""
    return tuple(replace(each, devices=()) for each in machines) if VISIBLE in arguments.env else machines


def _with_hosts(
    job: SparkJob, machines: tuple[Machine, ...], answer: Callable[[int], None], stack: ExitStack
) -> Arguments:
    """Returns the job's arguments with its machines, which are there then; of one machine, mpirun needs no names."""
    if len(machines) == 1:
        answer(0)
        return job.arguments
    hub = Hub(_as_host(machines, 0, 0))
    stack.callback(hub.close, 0)
    answer(hub.port)
    return hub.gather(job.arguments, job.start)


def _as_host(machines: tuple[Machine, ...], index: int, port: int) -> ClusterHost:
    return ClusterHost("Spark", index, len(machines), machines[0].address, len(machines[index].tasks), port)


def _follow(driver: Channel, end: Callable[[], NoReturn]) -> Callable[[], None]:
    """Ends the job when the driver does; returns what waits until that has all that ranks have printed."""
    granted = threading.Event()

    def receive() -> None:
        try:
            while driver.receive() != SUPERSEDED:
                granted.set()
            end()
        except ChannelClosed:  # the driver has gone
            if not granted.is_set():
                end()

    def finish() -> None:
        with closing(driver):
            driver.send(ALL_PRINTED)
            granted.wait()

    threading.Thread(target=receive, daemon=True).start()
    return finish


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
    main()
