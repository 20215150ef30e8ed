"""Cases that every engine must pass: functions of a communicator, run on ranks of each kind."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from choros.comm import Communicator, global_process_set
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.threads import run_threads
from harness import check_case

Body = Callable[[Communicator], None]

#: Engine and number of ranks.
ALONE = [("local", 1), ("threads", 1)]
TOGETHER = [("threads", 2), ("threads", 3), ("mpi", 2), ("mpi", 3)]


def on_ranks(body: Body) -> Callable[..., None]:
    """Makes ``body`` a case of the harness: called without a communicator, it gets that of all real ranks."""

    @functools.wraps(body)
    def case(communicator: Communicator | None = None) -> None:
        body(communicator or global_process_set.communicator)

    return case


def check(module: str, case: str, engine: str, size: int) -> None:
    """Fails if ``case`` of ``module`` does on any of ``size`` ranks of ``engine``."""
    if engine == "mpi":
        check_case(module, size, case)
        return
    body = getattr(importlib.import_module(module), case)
    if engine == "threads":
        run_threads(body, size)
    else:
        body(LocalCommunicator())
