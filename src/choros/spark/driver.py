"""The Spark driver's part of a job: submits the barrier stage, shows what ranks print, returns their results."""

from __future__ import annotations

import itertools
import queue
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, final

import cloudpickle

from choros import durations
from choros.errors import ConfigError, LaunchError
from choros.spark.plan import ALL_PRINTED, DRIVER, STARTED, SUPERSEDED, Printed, Returned, SparkJob
from choros.spark.task import run_task
from choros.transport.address import LOOPBACK
from choros.transport.channel import Channel, ChannelClosed, Listener
from choros.transport.secret import Key

if TYPE_CHECKING:
    from pyspark import SparkContext


#: How often Spark tries a stage, if the session does not say it.
_ATTEMPTS = 4
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
        self.received: queue.SimpleQueue[str | Printed | Returned | BaseException] = queue.SimpleQueue()
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
    if returned.failure is not None:
        raise returned.failure
    results: list[Any] = cloudpickle.loads(returned.results)
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
) -> Returned:
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
        while not isinstance(message := _next(port, deadline), Returned):
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


def _next(port: DriverPort, deadline: float | None) -> str | Printed | Returned | BaseException | None:
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
