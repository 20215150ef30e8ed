"""The barrier stage of a job: the Spark driver submits it, shows what ranks print and returns their results. A task, in
Spark's Python worker, only places: tasks tell each other where they run; the first one of each machine has a program
beside it, which starts the ranks there, and the others hold their slots.

::

    driver ◄── what ranks print ── host.py ◄─ a pipe ── task 0      task 2        task 1 ── a pipe ─► host.py
                                     │ mpirun          (first of machine a)  (first of machine b)       │ its daemon
                                  ranks 0, 1                                                         rank 2
                                     └───────── hub (launch/agents) ◄────────────────────────────────────┘

The program is a process of its own: it catches signals, has ranks as children, and changes the environment, which
Spark's worker, that other tasks use later, does not expect. When the worker dies, so does the program's input.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, final

import cloudpickle

from choros import durations
from choros.errors import ChorosError, ConfigError, LaunchError
from choros.spark.plan import ALL_PRINTED, DRIVER, STARTED, SUPERSEDED, Machine, Printed, SparkJob, machines_of
from choros.transport.address import LOOPBACK, this_host
from choros.transport.channel import Channel, ChannelClosed, Listener
from choros.transport.secret import Key

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext, SparkContext


#: How often Spark tries a stage, if the session does not say it.
_ATTEMPTS = 4
#: Python's arguments for the program beside a task.
_PROGRAM = ("-P", "-m", "choros.spark.host")
#: What Spark's messages begin with before they say what has happened.
_REASON = re.compile(r".*(?:Most recent failure reason: |Job aborted due to stage failure: |SparkException: )")


def show_in(out: TextIO | None, err: TextIO | None, printed: Printed) -> None:
    """Shows what ranks have printed; ``None``: in the driver's standard output or error."""
    stream = (err or sys.stderr) if printed.error else (out or sys.stdout)
    stream.write(printed.text)
    stream.flush()


def active_context() -> SparkContext:
    """Returns the Spark context of this process; a ``ConfigError`` if there is none."""
    try:
        from pyspark import SparkContext
    except ImportError as error:
        raise ConfigError("choros.spark needs pyspark: pip install 'choros[spark]'.") from error
    context = SparkContext._active_spark_context  # Horovod takes it, too: getOrCreate would make one
    if context is None:
        raise ConfigError(
            "there is no active SparkContext: create a session, such as SparkSession.builder.getOrCreate(), first. "
            "Sessions of Spark Connect have none."
        )
    return context


@final
class DriverPort:
    """Listens for the program that starts the ranks; of several attempts of a stage, only the last one goes on.

    Attributes:
        received: what it sends, and how the stage has ended.
    """

    def __init__(self, secret: str, address: str) -> None:
        listening = socket.create_server((address, 0))
        self.port = int(listening.getsockname()[1])
        self.received: queue.SimpleQueue[str | Printed | bytes | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last: tuple[Channel, threading.Event] | None = None
        self._listener = Listener(listening, Key(bytes.fromhex(secret)), DRIVER, self._serve)

    def close(self) -> None:
        """Stops listening, and ends the job if it still runs."""
        self._listener.close()
        with self._lock:
            if self._last is not None:
                self._last[0].close()

    def _serve(self, channel: Channel, first: Any) -> None:
        if first != STARTED:
            return
        gone = threading.Event()
        with self._lock:
            before, self._last = self._last, (channel, gone)
            if before is not None:
                with suppress(ChannelClosed):
                    before[0].send(SUPERSEDED)
                before[1].wait(durations.CONNECT)  # a machine that is lost does not end the connection
                before[0].close()
        try:
            self.received.put(first)
            channel.send(None)
            while (message := channel.receive()) != ALL_PRINTED:
                self.received.put(message)
            channel.send(None)
        except ChannelClosed:
            pass
        finally:
            gone.set()


def run_job(job: SparkJob, size: int, show: Callable[[Printed], None]) -> list[Any]:
    """Runs ``job`` on ``size`` ranks in a barrier stage, and again when an executor was lost, as often as Spark tries
    other stages, an elastic job with as many as there are slots; returns what its ranks have. Sets ``job.driver``.
    """
    context, arguments = active_context(), job.arguments
    configuration = context.getConf()
    attempts = int(configuration.get("spark.stage.maxConsecutiveAttempts") or _ATTEMPTS)
    host = configuration.get("spark.driver.host") or LOOPBACK
    own = LOOPBACK if host in (LOOPBACK, "localhost") else ""
    least, most = arguments.min_num_proc or size, arguments.max_num_proc or size
    with closing(DriverPort(job.secret, configuration.get("spark.driver.bindAddress") or own)) as port:
        tasks = _wait_for_slots(context, size, size, job.start)
        for attempt in itertools.count(1):
            stage = replace(job, driver=f"{host}:{port.port}", arguments=replace(arguments, num_proc=tasks))
            try:
                returned = _run_stage(context, stage, tasks, port, show)
                break
            except StageLost as lost:
                if attempt == attempts:
                    raise
                text = f"choros.spark: {lost} It is tried again: attempt {attempt + 1} of {attempts}.\n"
                show(Printed(error=True, text=text))
            tasks = _wait_for_slots(context, least, most, arguments.elastic_timeout or job.start)
    results: list[Any] | ChorosError = cloudpickle.loads(returned)
    if isinstance(results, ChorosError):
        raise results
    return results


def slots_of(context: SparkContext) -> int:
    """Returns how many tasks Spark can run at once."""
    jvm_context: Any = context._jsc.sc()  # no public way: Spark checks barrier stages by it
    profile = jvm_context.resourceProfileManager().resourceProfileFromId(0)
    return int(jvm_context.maxNumConcurrentTasks(profile))


def _wait_for_slots(context: SparkContext, least: int, most: int, seconds: float) -> int:
    """Waits for slots for ``least`` tasks, and a moment for ``most``; returns for how many there are. Without them,
    Spark would refuse the stage, and try it again for ten minutes.
    """
    began = time.monotonic()
    while (slots := slots_of(context)) < most:
        waited = time.monotonic() - began
        if slots >= least and waited >= min(seconds, durations.SPARK_EXECUTORS):
            return slots
        if waited >= seconds:
            raise _too_slow(least, seconds, f"Spark has {slots} slots")
        time.sleep(durations.SPARK_LOOK)
    return most


def _too_slow(tasks: int, seconds: float, what: str) -> LaunchError:
    return LaunchError(
        f"Timed out waiting for Spark tasks to start. A barrier stage of {tasks} tasks needs {tasks} free slots at "
        f"once, and did not get them within start_timeout={seconds:g} s: {what}. Give a smaller num_proc, or more "
        "executors."
    )


def _run_stage(
    context: SparkContext, job: SparkJob, tasks: int, port: DriverPort, show: Callable[[Printed], None]
) -> bytes:
    """Runs the stage in a thread of its own, while this one shows what ranks print; returns what it has returned."""
    from pyspark.util import InheritableThread

    group = f"choros.spark {uuid.uuid4()}"

    def submit() -> None:
        try:
            context.setJobGroup(group, "choros.spark", interruptOnCancel=True)
            places = context.parallelize(range(tasks), tasks).barrier()
            (returned,) = places.mapPartitions(partial(run_task, job)).collect()
            port.received.put(returned)
        except BaseException as error:  # noqa: BLE001  (raised in the main thread)
            port.received.put(error)

    thread = InheritableThread(target=submit)
    thread.daemon = True
    thread.start()
    deadline: float | None = time.monotonic() + job.start  # none once all tasks have started
    try:
        while not isinstance(message := _next(port, deadline), bytes):
            if isinstance(message, Printed):
                show(message)
            elif isinstance(message, str):  # STARTED
                deadline = None
            elif message is None:
                raise _too_slow(tasks, job.start, "other jobs have them")
            else:
                raise _spark_error(message, has_started=deadline is None) from None
    except BaseException:
        with suppress(Exception):  # the context may have been stopped
            context.cancelJobGroup(group)
        raise
    thread.join()
    return message


def _next(port: DriverPort, deadline: float | None) -> str | Printed | bytes | BaseException | None:
    with suppress(queue.Empty):
        return port.received.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
    return None


class StageLost(LaunchError):
    """Spark has given up the stage, not because of what a rank did."""


def _spark_error(error: BaseException, *, has_started: bool) -> BaseException:
    """Returns an error with what Spark says, without the stacks of its JVM: what a task of choros' has raised, why an
    executor was lost, or the reason that comes first.
    """
    if not isinstance(error, Exception):
        return error
    text = str(getattr(error, "java_exception", None) or error)
    said = re.findall(r"^choros\.errors\.\w+: (.*)$|(ExecutorLostFailure.*)$", text, re.MULTILINE)
    why = "".join(said[-1]) if said else _REASON.sub("", text.partition("\n")[0])
    is_final = "cancelled" in text or "spark.driver.maxResultSize" in text
    if is_final or not (has_started or "ExecutorLostFailure" in text):
        return LaunchError(f"Spark could not run the job: {why}")
    return StageLost(f"Spark has lost a task of the barrier stage: {why.rstrip('.')}.")


def run_task(job: SparkJob, _: Iterable[Any]) -> Iterator[bytes]:
    """Runs this task's part of ``job``; yields what the program of the first one answers: the ranks' results, or the
    error that says why there are none, pickled, as the program has what unpickles them.
    """
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    number = context.partitionId()
    own = json.dumps(asdict(_own_machine(context, number)))
    machines = machines_of([Machine(**json.loads(text)) for text in context.allGather(own)])
    index = next((index for index, machine in enumerate(machines) if machine.tasks[0] == number), None)
    if index == 0:
        with _beside(job, machines, 0, 0) as answer:
            port: int | bytes = answer()  # the hub's, for the other machines; 0 if there are none
            if isinstance(port, bytes):
                raise cloudpickle.loads(port)
            context.allGather(str(port))
            returned = answer()
            context.barrier()  # an executor that is lost never comes here: the stage fails, not the job
        yield returned
        return
    hub = int(context.allGather("")[0])
    if index is not None:
        with _beside(job, machines, index, hub) as answer:
            answer()
    context.barrier()


def _own_machine(context: BarrierTaskContext, number: int) -> Machine:
    from pyspark import SparkFiles

    address = context.getTaskInfos()[number].address.rpartition(":")[0]
    devices = context.resources().get("gpu")
    directory = os.path.join(os.path.abspath(SparkFiles.getRootDirectory()), f"choros-{uuid.uuid4().hex}")
    return Machine(this_host(), address, directory, [number], [devices.addresses if devices else ()])


@contextmanager
def _beside(job: SparkJob, machines: tuple[Machine, ...], index: int, port: int) -> Iterator[Callable[[], Any]]:
    """A block beside which the program of machine ``index`` runs, with what returns its next message; when it is left,
    or this process dies, the program ends.
    """
    own = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)  # which the ranks' Python knows itself
    shipped = [path for path in sys.path if path and not any(Path(path).is_relative_to(each) for each in own)]
    with subprocess.Popen(
        [sys.executable, *_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(shipped)},  # choros may be what the application ships
        start_new_session=True,  # Spark ends its workers by a signal to their group
    ) as process:
        assert process.stdin is not None  # noqa: S101  (a pipe)
        try:
            pickle.dump((job, machines, index, port), process.stdin)
            process.stdin.flush()
            yield partial(_answer, process)
        finally:
            process.stdin.close()
            process.wait()


def _answer(process: subprocess.Popen[bytes]) -> Any:
    try:
        return pickle.load(process.stdout)  # type: ignore[arg-type]  # noqa: S301  (from a process of this one's)
    except EOFError:
        code = process.wait()
        raise LaunchError(
            f"the program that starts the ranks of this machine has ended with {code}: the executor's log says why."
        ) from None
