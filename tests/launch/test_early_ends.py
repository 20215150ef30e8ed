"""The exit code of a job says whether its training was finished: by ranks that made the last step."""

import sys
from pathlib import Path

import pytest

from launch.launched import rank_script, run

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("early_ends_script.py")

#: How ranks end, at which step; the exit code; how many ranks make the last step; a part of what chorosrun says.
ENDS = [
    ("1:2:exit,0:3:kill,2:3:kill", 1, 0, "(MismatchError)"),
    ("1:2:_exit,0:4:raise,2:4:raise", 1, 0, "(ValueError)"),
    ("1:2:_exit,0:4:kill,2:5:kill", 69, 0, "0 of 3 ranks are left, fewer than --min-np 1"),
    ("1:2:leave,0:5:raise,2:5:raise", 1, 0, "(ValueError)"),
    ("1:2:leave,0:5:kill,2:5:kill", 69, 0, "0 of 3 ranks are left, fewer than --min-np 1"),
    ("0:2:leave,1:2:leave,2:2:leave", 143, 0, "all ranks have left, and none has made the job's last step"),
    ("1:2:kill", 0, 2, "2 ranks go on"),
    ("1:2:raise", 0, 2, "2 ranks go on"),
    ("1:2:leave", 0, 2, "it leaves after this step, and the others go on"),
    ("1:2:_exit", 0, 2, ""),
]


@pytest.mark.parametrize(("ends", "code", "finished", "says"), ENDS, ids=[each[0] for each in ENDS])
def test_only_ranks_that_made_the_last_step_have_finished(ends, code, finished, says):
    ended = run("-np", 3, "--min-np", 1, sys.executable, SCRIPT, ends)
    assert (ended.code, ended.out.count("made the last step")) == (code, finished), ended
    assert says in ended.err


NEEDLESS = """
import atexit, signal
from pathlib import Path
is_new = "CHOROS_NEW_RANK" in os.environ
if is_new:
    atexit.register(Path("left").touch)
import choros
from choros import comm
choros.init()
with comm.opening():
    if is_new:
        Path("came").touch()
        comm.admit()
    if choros.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not comm.global_process_set.communicator.allreduce(float(Path("came").exists())):
        time.sleep(0.01)
    while rank == 2 and not Path("left").exists():
        time.sleep(0.01)
    raise ValueError("mine")
"""


def test_a_new_rank_that_the_others_do_not_take_in_has_not_finished(tmp_path):
    """It leaves when rank 0, which has started it, is lost."""
    script = rank_script(tmp_path / "script.py", NEEDLESS)
    ended = run("-np", 3, "--min-np", 1, sys.executable, script, cwd=tmp_path)
    assert (ended.code, "ValueError: mine" in ended.err) == (1, True), ended
    assert (tmp_path / "left").exists()


@pytest.mark.parametrize(
    "how",
    [
        "choros.shutdown(); time.sleep(0.2); os._exit(0)",
        "atexit.register(lambda: (time.sleep(0.2), os._exit(0)))",
    ],
    ids=["in the script", "at its end"],
)
def test_a_rank_that_ends_without_leaving_after_all_scripts_have_ended(tmp_path, how):
    body = f"import atexit, choros\nchoros.init()\nif rank == 1: {how}"
    ended = run("-np", 2, sys.executable, rank_script(tmp_path / "script.py", body))
    assert ended.code == 0, ended.err
    assert "rank 1 ended with exit code 0 without leaving the job, as os._exit() does" in ended.err
    assert "All scripts had ended: the job has finished." in ended.err
