"""The torch engine on real processes: ranks of torchrun and of MPI, and starts that fail.

Ranks of ``TF_CONFIG``, which train with other frameworks too, are in ``distribute/test_multi_worker.py``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

import choros
from choros.errors import ConfigError, EngineUnavailable
from choros.topology import ENVIRONMENTS
from comm.engines import ON_TORCH
from comm.starts import by_hand, step_of_slurm, together
from harness import Job, case_names, check_case, free_port, needs, on
from warm.servers import warm_python

pytestmark = needs("torch")

OVER_MPI = "comm.torch_over_mpi_cases"
DEVICES = "comm.device_cases"
TORCH = "comm.torch_cases"
#: Cases of other modules that ranks of torchrun run as well.
ALSO = (
    ("comm.job_cases", "case_a_job_can_be_left_and_joined_many_times"),
    ("comm.job_cases", "case_disjoint_sets_are_independent"),
    ("comm.job_cases", "case_init_registers_sets_and_shutdown_forgets_them"),
    ("comm.job_cases", "case_only_members_of_a_process_set_can_use_it"),
    ("comm.job_cases", "case_collectives_of_overlapping_sets_can_alternate"),
    ("keras_face.training_cases", "case_sgd_with_momentum_on_uneven_batches"),
)


def cases_of(*modules: str) -> list[tuple[str, str]]:
    return [(module, case) for module in modules for case in case_names(module)]


@on(ON_TORCH)
@pytest.mark.parametrize(("module", "case"), [*cases_of(TORCH, DEVICES), *ALSO])
def test_ranks_of_torchrun(module: str, case: str, job: Job) -> None:
    check_case(module, case, job)


@on(Job(2, "torch"))
@pytest.mark.parametrize(("module", "case"), cases_of(DEVICES, OVER_MPI))
def test_ranks_of_mpi(module: str, case: str, job: Job) -> None:
    check_case(module, case, job)


DIES = """
import os, choros
choros.init()
total = lambda: choros.global_process_set.communicator.allreduce(1)
total()
choros.add_process_set([1])
if choros.rank() == 1: os._exit(7)
try: total()
except choros.EngineError as error: print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_rank_whose_peer_has_died_gets_an_error_and_the_log_names_the_engine() -> None:
    environs = [{**environ, "CHOROS_LOG_LEVEL": "INFO"} for environ in by_hand(2)]
    (code, output), (code_of_dead, other_output) = together([*warm_python("torch"), "-c", DIES], environs)
    assert (code, code_of_dead) == (0, 7), output + other_output
    assert "choros: engine torch: torchrun started 2 ranks without MPI" in output
    assert "PeerLostError allreduce(op=Average" in output
    assert "cannot be completed: rank 1 on " in output
    assert "engine" not in other_output
    assert "Traceback" not in output  # at exit, of a rank that is in no process set of the dead one


JOINS = """
import choros
from choros.parallel import objects
choros.init()
print(choros.rank(), choros.size(), choros.local_rank(), choros.cross_size(), objects.allgather_object(choros.rank()))
"""


@pytest.mark.slow
def test_tasks_of_a_slurm_step_are_ranks() -> None:
    environs = [{**environ, "CHOROS_LOG_LEVEL": "INFO"} for environ in step_of_slurm(2)]
    outcomes = together([*warm_python("torch"), "-c", JOINS], environs)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    (_, first), (_, second) = outcomes
    assert "choros: engine torch: srun started 2 ranks without MPI" in first
    assert "0 2 0 1 [0, 1]" in first
    assert "1 2 1 1 [0, 1]" in second
    assert "CHOROS_SECRET" not in first  # on one host, they prove that they run as the same user


DIES_AT_START = """
import os, choros
from choros.comm.engines import torch as engine
if os.environ["RANK"] == "1": engine.exchange_locations = lambda *_: os._exit(7)  # it has connected, and dies
try: choros.init()
except choros.EngineError as error: print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_rank_whose_peer_dies_at_the_start_gets_an_error() -> None:
    (code, output), (code_of_dead, other_output) = together([*warm_python("torch"), "-c", DIES_AT_START], by_hand(2))
    assert (code, code_of_dead) == (0, 7), output + other_output
    assert "PeerLostError rank 1 ended before all ranks had connected: see what it printed." in output


# ── starts that fail ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Removes the variables of the launcher that started the tests; each test sets its own."""
    for launcher in ENVIRONMENTS:
        monkeypatch.delenv(launcher.rank, raising=False)
    for name in ("TF_CONFIG", "CHOROS_ENGINE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CHOROS_START_TIMEOUT", "0.2")
    yield monkeypatch
    choros.shutdown()


def set_environ(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_master_that_no_process_listens_at(start: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_environ(start, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(EngineUnavailable, match=rf"rank 1: nothing answers at 127\.0\.0\.1:{port}.* within 0.2 s"):
        choros.init()


def test_master_whose_name_is_unknown(start: pytest.MonkeyPatch) -> None:
    set_environ(start, RANK=1, WORLD_SIZE=2, MASTER_ADDR="nowhere.invalid", MASTER_PORT=1)
    with pytest.raises(EngineUnavailable, match=r"nothing answers at nowhere\.invalid:1"):
        choros.init()


def test_rank_that_does_not_connect(start: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    set_environ(start, RANK=0, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    with pytest.raises(EngineUnavailable, match=r"ranks 1, 2 of 3 did not connect within 0.2 s"):
        choros.init()
    assert "authenticate" not in caplog.text  # rank 0, which connects to itself, leaves no handshake unfinished


def test_port_in_use(start: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        set_environ(start, RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(EngineUnavailable, match=rf"rank 0 cannot listen at 127\.0\.0\.1:{port}"):
            choros.init()


def test_master_that_is_not_set(start: pytest.MonkeyPatch) -> None:
    start.delenv("MASTER_ADDR", raising=False)
    set_environ(start, RANK=0, WORLD_SIZE=2)
    with pytest.raises(EngineUnavailable, match=r"MASTER_ADDR and MASTER_PORT are not set: the address"):
        choros.init()


def test_start_timeout_that_is_no_number(start: pytest.MonkeyPatch) -> None:
    set_environ(start, CHOROS_START_TIMEOUT="soon")
    with pytest.raises(ConfigError, match="CHOROS_START_TIMEOUT='soon' is not a number of seconds above 0"):
        choros.init()


def test_without_torch_the_error_says_how_to_install_it() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from choros.errors import EngineUnavailable\n"
        "try: import choros.comm.engines.torch\n"
        "except EngineUnavailable as error: assert 'pip install torch' in str(error)\n"
        "else: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_engine_can_be_forced_for_one_process(start: pytest.MonkeyPatch) -> None:
    set_environ(start, CHOROS_ENGINE="torch", CHOROS_START_TIMEOUT=60)
    choros.init()
    communicator = choros.global_process_set.communicator
    assert type(communicator).__name__ == "TorchCommunicator"
    assert communicator.allgather([[1], [2]]).tolist() == [[1], [2]]
    assert communicator.allreduce(2.5) == 2.5
