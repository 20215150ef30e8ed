"""Cases that every engine must pass: functions of a communicator, run on ranks of each kind."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import pytest

from choros.comm import Communicator, global_process_set
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.threads import run_threads
from comm import starts
from harness import case_names, check_case

Body = Callable[[Communicator], None]

#: Engine and number of ranks.
ALONE = [("local", 1), ("threads", 1)]
TOGETHER = [("threads", 2), ("threads", 3), ("mpi", 2), ("mpi", 3), ("torch", 3)]
#: One launch runs the cases of all these on the torch engine; the first imports the others'.
ON_TORCH = (
    "comm.torch_cases",
    "comm.device_cases",
    "comm.collective_cases",
    "comm.mismatch_cases",
    "comm.waiting_cases",
)
#: Cases of other modules that it runs as well.
ALSO_ON_TORCH = (
    "case_a_job_can_be_left_and_joined_many_times",
    "case_disjoint_sets_go_at_their_own_pace",
    "case_init_registers_sets_and_shutdown_forgets_them",
    "case_members_communicate_and_outsiders_are_told_that_they_cannot",
    "case_sets_overlap_and_take_turns_with_all_ranks",
    "case_sgd_with_momentum_on_uneven_batches",
)


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
    if engine == "torch":
        on_torch(case)
        return
    body = getattr(importlib.import_module(module), case)
    if engine == "threads":
        run_threads(body, size)
    else:
        body(LocalCommunicator())


def on_torch(case: str) -> None:
    """Fails if ``case`` of one of ``ON_TORCH`` does on any of three ranks that torchrun started."""
    pytest.importorskip("torch")
    cases = (*(name for module in ON_TORCH for name in case_names(module)), *ALSO_ON_TORCH)
    errors = starts.run_cases(ON_TORCH[0], "torchrun", 3, "torch", cases)[case]
    assert not errors, f"\n{errors}"
