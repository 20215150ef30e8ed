"""Events of ranks reach chorosrun; those of a rank's child processes do not."""

import sys

import pytest

from launch.launched import rank_script, run

pytestmark = pytest.mark.slow

COLLECTIVE = """
import choros, numpy, os, subprocess
choros.init()
for again in range(2):
    choros.comm.global_process_set.communicator.allreduce(numpy.ones(4, numpy.float32), name="loss")
    choros.shutdown()
    choros.init()
# As a rank of its own job: MPI fails if a second process takes this one's rank.
environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
subprocess.run([sys.executable, "-c", "import choros; choros.init()"], check=True, env=environ)
"""


def events_of(err, rank):
    """A rank's events as chorosrun prints them."""
    mark = f"chorosrun: [{rank}] "
    return [line.removeprefix(mark) for line in err.splitlines() if line.startswith(mark)]


def test_events_are_printed_on_request(tmp_path):
    script = rank_script(tmp_path / "script.py", COLLECTIVE)
    ended = run("-np", 2, sys.executable, script, env={"CHOROS_LOG_LEVEL": "debug"})
    assert ended.code == 0, ended.err
    for rank in (0, 1):
        events = events_of(ended.err, rank)
        assert events[0].startswith("rank started: ")
        assert events[-1].startswith("rank ended: ")
        assert "code=0" in events[-1]
        assert sum(event.startswith("collective matched: loss") for event in events) == 2
        assert sum("loss" in event and "process_set=0,1, bytes=16" in event for event in events) == 2


def test_a_rank_that_is_stopped(tmp_path):
    script = rank_script(tmp_path / "script.py", "if rank == 1: sys.exit(3)\ntime.sleep(100)")
    ended = run("-np", 2, "--log-level", "DEBUG", sys.executable, script)
    assert ended.code == 3
    assert "rank stopped (reason=failure)" in events_of(ended.err, 0)
    assert any("code=3" in event for event in events_of(ended.err, 1))


def test_without_listeners_collectives_are_not_observed(tmp_path):
    script = rank_script(
        tmp_path / "script.py", "import choros; choros.init(); print('collective begun' in choros.observe.events.heard)"
    )
    assert run("-np", 1, sys.executable, script).out == "False\n"


def test_an_invalid_log_level_is_an_error_that_leaves_no_directory(tmp_path):
    ended = run("-np", 1, sys.executable, "-c", "pass", env={"CHOROS_LOG_LEVEL": "loud", "TMPDIR": str(tmp_path)})
    assert ended.code == 2
    assert ended.err.startswith("chorosrun: CHOROS_LOG_LEVEL='loud' is not one of ")
    assert not list(tmp_path.iterdir())
