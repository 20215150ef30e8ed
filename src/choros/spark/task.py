"""A task of the barrier stage, in Spark's Python worker: it only places. Tasks tell each other where they run; the
first one of each machine has a program beside it, which starts the ranks there, and the others hold their slots.

::

    driver ◄── what ranks print ── host.py ◄─ a pipe ── task 0      task 2        task 1 ── a pipe ─► host.py
                                     │ mpirun          (first of machine a)  (first of machine b)       │ its daemon
                                  ranks 0, 1                                                         rank 2
                                     └───────── hub (launch/agents) ◄────────────────────────────────────┘

The program is a process of its own: it catches signals, has ranks as children, and changes the environment, which
Spark's worker, that other tasks use later, does not expect. When the worker dies, so does the program's input.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from choros.errors import LaunchError
from choros.spark.plan import Machine, Returned, SparkJob, machines_of
from choros.transport.address import this_host

if TYPE_CHECKING:
    from pyspark import BarrierTaskContext

_PROGRAM = ("-P", "-m", "choros.spark.host")


def run_task(job: SparkJob, _: Iterable[Any]) -> Iterator[Returned]:
    """Runs this task's part of ``job``; yields what the ranks have returned, from the first task."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    number = context.partitionId()
    own = json.dumps(asdict(_own_machine(context, number)))
    machines = machines_of([Machine(**json.loads(text)) for text in context.allGather(own)])
    index = next((index for index, machine in enumerate(machines) if machine.tasks[0] == number), None)
    if index == 0:
        with _beside(job, machines, 0, 0) as answer:
            port: int | Returned = answer()  # the hub's, for the other machines; 0 if there are none
            if isinstance(port, Returned):
                raise port.failure or LaunchError("the program that starts the ranks has ended too early.")
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
