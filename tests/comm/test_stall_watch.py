"""Ranks that MPI did not start: those that wait report who is missing, and what it does."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from comm.starts import Environ, by_hand, of_tf_config, together
from harness import needs
from warm.servers import warm_python

pytestmark = needs("torch")

#: One rank is stopped before a call of all others; a child of its own continues it when all have reported it that are
#: to do so. The first of the others makes its call when the last is about to, so that it finds it waiting.
STOPS = """
import os, pathlib, signal, sys, time
import choros
folder, stopped = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def wait_for(*names):
    while not all((folder / name).exists() for name in names): time.sleep(0.02)
choros.durations.STACKS = 60.0  # other tests may keep the processors from py-spy
choros.init()
rank = choros.rank()
communicator = choros.global_process_set.communicator
communicator.allreduce([1.0], name="first")
if rank == stopped:
    pid = os.getpid()
    if os.fork() == 0:
        wait_for(*(["reported 1", "reported 2"] if stopped == 0 else ["reported 0"]))
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)
else:
    import logging
    class Reported(logging.Handler):
        def emit(self, record):
            print(record.getMessage(), flush=True)
            if "s for rank" in record.getMessage(): (folder / f"reported {rank}").touch()
    logging.getLogger("choros").addHandler(Reported())
    (folder / f"calls {rank}").touch()
    if rank == 0: wait_for("calls 2")
communicator.allreduce([1.0], name="loss")
communicator.barrier(name="the end")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("start", "stopped"), [(by_hand, 1), (by_hand, 0), (of_tf_config, 1)])
def test_a_rank_that_is_stopped_is_reported_by_the_first_that_waits(
    tmp_path: Path, start: Callable[[int], list[Environ]], stopped: int
) -> None:
    """Rank 0 has the store in which the others look who else waits."""
    argv = [*warm_python("torch"), "-c", STOPS, str(tmp_path), str(stopped)]
    outcomes = together(argv, [{**environ, "CHOROS_STALL_SECONDS": "2"} for environ in start(3)])
    assert [code for code, _ in outcomes] == [0, 0, 0], outcomes
    reports = [output for _, output in outcomes if f"s for rank {stopped} in allreduce(name='loss'" in output]
    assert len(reports) == (1 if stopped else 2), outcomes  # without the store, each reports for itself
    assert re.search(
        r"ranks? [\d, ]+ ha(s|ve) waited \d+ s for rank \d in allreduce\(name='loss', .*, since ", reports[0]
    )
    assert "All have made allreduce(name='first', " in reports[0]
    assert re.search(rf"  rank {stopped} on \S+, PID (\d+) is stopped by a signal: kill -CONT \1 continues", reports[0])
    assert "os.kill(pid, signal.SIGSTOP)" in reports[0] or "in <module>" in reports[0]
