"""Joining and leaving a job: alone, with others in ``job_cases.py``, and if one rank leaves before the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import choros
from choros.errors import ConfigError, EngineUnavailable, NotInitializedError
from choros.parallel import objects, ops
from choros.settings import Config
from choros.topology import ENVIRONMENTS
from harness import CHOROSRUN, Job, check_case, on

JOBS = "comm.job_cases"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the variables of the launcher that started the tests."""
    for launcher in ENVIRONMENTS:
        monkeypatch.delenv(launcher.rank, raising=False)
    for name in ("TF_CONFIG", "CHOROS_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    yield
    choros.shutdown()


@on(Job(3), cases=JOBS)
def test_three_ranks(case: str, job: Job) -> None:
    check_case(JOBS, case, job)


# ── one rank that leaves ─────────────────────────────────────────────────────────────────────────

#: The program of rank 0 after rank 1 has ended, and the job's exit code.
LEFT_ALONE = {
    "fails": ("while True: total()", 1),
    "gives up": (
        "try:\n"
        "    while True: total()\n"
        "except choros.MismatchError as error:\n"
        "    for _ in range(2):\n"
        "        try: total()\n"
        "        except choros.MismatchError as again: assert str(again) == str(error)\n"
        "    print(error, flush=True)\n"
        "    sys.exit(3)",
        3,
    ),
}


FORKS = """
import os, sys, numpy, choros
choros.init()
communicator = choros.comm.global_process_set.communicator
for crashes in (False, True):
    child = os.fork()
    if child == 0:
        assert not crashes
        sys.exit(0)
    os.waitpid(child, 0)
    assert communicator.allreduce(numpy.ones(3)).tolist() == [1.0] * 3
"""
LONG = """
import types
import numpy, choros
from choros.comm.engines import mpi
mpi._MESSAGE_BYTES = 8
choros.init()
communicator = choros.comm.global_process_set.communicator
rows = numpy.arange(3 * communicator.rank, 3 * communicator.rank + 2 + communicator.rank, dtype="float64")
assert communicator.allgather(rows).tolist() == [0.0, 1.0, 3.0, 4.0, 5.0]
gcd, units = mpi.math.gcd, []
mpi.math = types.SimpleNamespace(gcd=lambda *counts: units.append(gcd(*counts)) or units[-1])
received, splits = communicator.alltoall(rows, [1, 1 + communicator.rank])
assert received.tolist() == [[0.0, 3.0], [1.0, 4.0, 5.0]][communicator.rank], received
assert units[-1] == 8, units
"""


@pytest.mark.parametrize("script", [FORKS, LONG], ids=["forked processes are no ranks", "more than MPI counts"])
def test_two_ranks(script: str) -> None:
    command = [CHOROSRUN, "-np", "2", sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(("rest", "code"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_rank_whose_peer_has_ended_gets_an_error_and_the_job_fails(rest: str, code: int) -> None:
    script = (
        "import sys, choros\n"
        "choros.init()\n"
        "total = lambda: choros.global_process_set.communicator.allreduce(1)\n"
        "total()\n"
        "if choros.rank() == 1: sys.exit()\n" + rest
    )
    command = [CHOROSRUN, "-np", "2", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code
    assert "rank 1: shutdown()" in done.stdout + done.stderr


# ── alone ────────────────────────────────────────────────────────────────────────────────────────


def test_process_without_a_launcher_is_a_job_of_one_rank() -> None:
    choros.init()
    assert (choros.rank(), choros.size(), choros.local_rank(), choros.local_size()) == (0, 1, 0, 1)
    assert choros.global_process_set.included()
    assert ops.allreduce(2.5) == 2.5


NEED_INIT: dict[str, Callable[[], object]] = {
    "rank": choros.rank,
    "size": choros.size,
    "local_rank": choros.local_rank,
    "local_size": choros.local_size,
    "cross_rank": choros.cross_rank,
    "cross_size": choros.cross_size,
    "is_homogeneous": choros.is_homogeneous,
    "add_process_set": lambda: choros.add_process_set([0]),
    "remove_process_set": lambda: choros.remove_process_set(choros.global_process_set),
    "a collective": lambda: ops.allreduce(1.0),
    "a collective of ProcessSet": lambda: objects.broadcast_object(1, process_set=choros.ProcessSet([0])),
}


@pytest.mark.parametrize("what", NEED_INIT)
def test_functions_before_init_and_after_shutdown_raise_an_error(what: str) -> None:
    for _ in range(2):
        assert not choros.is_initialized()
        with pytest.raises(
            NotInitializedError, match=rf"^{what}.* called before choros was initialised: call init\(\)"
        ):
            NEED_INIT[what]()
        choros.init()
        choros.shutdown()


def test_a_set_that_is_not_registered_since_init() -> None:
    kept = choros.ProcessSet([0])
    choros.init()
    with pytest.raises(ConfigError, match=r"the ranks \[0\] is not registered: call hvd\.add_process_set\(\)"):
        objects.broadcast_object(1, process_set=kept)
    choros.shutdown()


def test_shutdown_before_init_and_twice_does_nothing() -> None:
    choros.shutdown()
    choros.init()
    choros.shutdown()
    choros.shutdown()


def test_messages_are_shown_once_when_a_library_has_added_a_handler() -> None:
    code = (
        "import choros, logging\n"
        "choros.init()\n"
        "log = logging.getLogger('choros')\n"
        "log.warning('first')\n"
        "logging.basicConfig()\n"
        "log.warning('second')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == "choros: first\nWARNING:choros:second\n"


def test_set_of_the_only_rank_exists_already() -> None:
    choros.init()
    with pytest.raises(ConfigError, match="has the same ranks already"):
        choros.add_process_set([0])


@pytest.mark.parametrize("ranks", [[0, 0], [-1]])
def test_process_set_of_invalid_ranks(ranks: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected distinct ranks, 0 or more"):
        choros.ProcessSet(ranks)


TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "error", "text"),
    [
        ({"CHOROS_ENGINE": "nccl"}, ConfigError, "CHOROS_ENGINE='nccl' is not one of auto, local, mpi"),
        ({**TWO_RANKS, "CHOROS_ENGINE": "local"}, ConfigError, "is for one rank, but torchrun started 2"),
        (TWO_RANKS, EngineUnavailable, "tart the script with chorosrun -np 2"),
    ],
)
def test_environment_that_no_engine_supports(
    environ: dict[str, str], error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=text):
        choros.init()
    assert not choros.is_initialized()


@pytest.mark.parametrize("environ", [{}, {"CHOROS_ENGINE": ""}, {"CHOROS_ENGINE": "auto"}])
def test_engine_is_chosen_automatically_unless_named(environ: dict[str, str]) -> None:
    assert Config.from_environ(environ).engine == "auto"
