"""Other users of the machine run no code in a job, remove nothing, and neither stop nor delay it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import pytest

from choros import durations
from choros.elastic.commit_store import CommitStore
from choros.errors import ConfigError
from choros.launch.driver.output import open_files
from choros.transport.peers import ports_of
from launch.attacks import connect_to_all, plant_links, read_everything
from launch.launched import CHOROSRUN, Running
from launch.users import OTHER, VICTIM, as_user, in_own_network, process_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gates need Linux"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # What one test does to the jobs of a user, it does to those of another test.
    pytest.mark.xdist_group("other users"),
]
RANKS = Path(__file__).with_name("joining_ranks.py")
USERS = pytest.mark.parametrize("user", [0, VICTIM], ids=["root", "user"])
WAITS = """
import sys, time
from pathlib import Path
import choros
from choros.parallel.objects import allgather_object
choros.init()
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("sum", sum(allgather_object(choros.rank())), flush=True)
"""
FUNCTION = """
import choros

def total():
    from choros.parallel.objects import allgather_object
    choros.init()
    return sum(allgather_object(choros.rank()))

if __name__ == "__main__":
    print("sums", choros.run(total, num_proc=2))
"""
SERVERS = """
import keras, numpy
from choros import distribute

strategy = distribute.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
model.fit(numpy.ones((32, 4)), numpy.ones((32, 3)), batch_size=8, verbose=0)
print("trained", flush=True)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can enter and write."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def started_by(user: int) -> Sequence[str]:
    return CHOROSRUN if user == 0 else (*as_user(user), *CHOROSRUN)


@contextmanager
def job(
    user: int, shared: Path, *arguments: str, own_directory: bool = False
) -> Iterator[tuple[Running, Callable[[], None]]]:
    """A job of two ranks of ``user`` that have come, and what lets it end; it ends well.

    With ``own_directory`` its temporary files are in ``shared / "tmp"``.
    """
    script, temporary = shared / "script.py", shared / "tmp"
    script.write_text(WAITS)
    temporary.mkdir()
    temporary.chmod(0o1777)
    environ = {"TMPDIR": str(temporary)} if own_directory else {}
    command = [*arguments, "-np", "2", sys.executable, script, shared / "end"]
    with Running(*command, start=started_by(user), env=environ) as running:

        def end() -> None:
            (shared / "end").touch()

        yield running, end
        ended = running.end()
        assert ended.code == 0, ended.err
        assert ended.out.count("sum 1") == 2
        running.assert_nothing_left()


@USERS
def test_no_directory_is_removed_that_others_have_linked(user: int, shared: Path) -> None:
    precious = shared / "thesis"
    precious.mkdir()
    (precious / "chapter").write_text("text")
    os.chown(precious, user, user)
    with process_of(OTHER, partial(plant_links, precious)):
        time.sleep(0.5)
        with job(user, shared) as (running, end):
            running.wait_for(2, "ready")
            end()
    assert (precious / "chapter").read_text() == "text"
    for root in ("/tmp", "/dev/shm"):
        for path in Path(root).glob("*"):
            with suppress(FileNotFoundError):  # that of another test's job, which has ended
                if path.lstat().st_uid == OTHER:
                    subprocess.run(["rm", "-rf", str(path)], check=True)


def test_no_output_is_written_into_a_directory_of_another_user(shared: Path) -> None:
    theirs = shared / "logs" / "rank.0"
    theirs.mkdir(parents=True)
    os.chown(theirs, OTHER, OTHER)
    with pytest.raises(ConfigError, match=f"{theirs} belongs to another user"):
        open_files(shared / "logs", 1)


@USERS
@pytest.mark.parametrize("arguments", [(), ("--min-np", "1")], ids=["plain", "elastic"])
def test_who_connects_to_all_sockets_of_a_job_neither_stops_nor_delays_it(
    user: int, arguments: Sequence[str], shared: Path
) -> None:
    """It does so within a millisecond, before the ranks. Without gates, the job would never start."""

    def attacked() -> None:
        _, writes = os.pipe()
        with process_of(OTHER, partial(connect_to_all, user, writes)), job(user, shared, *arguments) as (running, end):
            running.wait_for(2, "ready")
            end()

    in_own_network(attacked)


@USERS
@pytest.mark.parametrize(
    ("script", "start", "says"),
    [
        pytest.param(FUNCTION, [sys.executable], "sums [1, 1]", id="choros.run"),
        pytest.param(SERVERS, [*CHOROSRUN, "--ps", 1, "-np", 1, sys.executable], "trained", id="ps",
                     marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_nor_one_of_a_function_or_of_parameter_servers(
    user: int, script: str, start: Sequence[object], says: str, shared: Path
) -> None:
    (shared / "script.py").write_text(script)
    as_this_user = as_user(user) if user else []

    def attacked() -> None:
        _, writes = os.pipe()
        begin = [*as_this_user, *map(str, start), str(shared / "script.py")]
        environ = {"KERAS_BACKEND": "torch"}
        with (
            process_of(OTHER, partial(connect_to_all, user, writes)),
            Running(start=begin, env=environ) as running,
        ):
            ended = running.end()
        assert ended.code == 0, ended
        assert says in ended.out

    in_own_network(attacked)


@USERS
@pytest.mark.parametrize("arguments", [(), ("--min-np", "1")], ids=["plain", "elastic"])
def test_nothing_of_a_job_can_be_read(user: int, arguments: Sequence[str], shared: Path) -> None:
    """Neither files that its processes have open or have made, nor their environments."""
    result = shared / "read"
    with job(user, shared, *arguments, own_directory=True) as (running, end):
        running.wait_for(2, "ready")
        assert list((shared / "tmp").iterdir())
        pids = [running.process.pid, *(process.pid for process in running.processes())]
        with process_of(OTHER, partial(read_everything, user, pids, [shared / "tmp", Path("/dev/shm")], result)):
            deadline = time.monotonic() + 20
            while not result.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        end()
    assert result.read_text().splitlines() == ["all"]


@USERS
def test_nor_does_it_when_a_new_rank_joins(user: int) -> None:
    """MPI connects the new rank through sockets that are open meanwhile; connections of others are ended."""

    def attacked() -> None:
        _, writes = os.pipe()
        start = started_by(user)
        environ = {durations.TEST_SCALE: "1"}  # a rank that joins while others connect to it takes long
        with (
            process_of(OTHER, partial(connect_to_all, user, writes)),
            Running("-np", 3, "--min-np", 2, sys.executable, RANKS, start=start, env=environ) as running,
        ):
            ended = running.end(seconds=300)
        assert (ended.code, ended.out.count("finished with 3")) == (0, 3), ended

    in_own_network(attacked)


@contextmanager
def spawning(user: int, namespace: str, port: int, marker: Path) -> Iterator[None]:
    """Another user's process asks mpirun, as a client of ``user``, to create ``marker``, until the block ends."""
    tried = marker.with_name(f"tried-{port}")
    command = [*as_user(OTHER), sys.executable, "-I", str(RANKS.with_name("spawning.py"))]
    with subprocess.Popen([*command, *map(str, (user, namespace, port, marker, tried))]) as process:
        end = time.monotonic() + 20
        while not tried.exists() and time.monotonic() < end:
            time.sleep(0.05)
        try:
            yield
        finally:
            process.kill()
    assert tried.exists()


@USERS
def test_mpirun_runs_no_command_for_another_user(user: int, shared: Path) -> None:
    """Who claims to be the job's user, and even knows the job's name, which is secret."""
    marker = shared / "ran"
    with job(user, shared) as (running, end):
        running.wait_for(2, "ready")
        processes = running.processes()
        mpirun = next(process for process in processes if process.name() in ("prterun", "mpirun"))
        rank = next(process for process in processes if "PMIX_NAMESPACE" in process.environ())
        namespace = rank.environ()["PMIX_NAMESPACE"]
        assert ports_of(mpirun.pid)
        ports = set().union(*(ports_of(process.pid) for process in processes))
        for port in ports:
            with spawning(user, namespace, port, marker):
                time.sleep(1)
        assert not marker.exists()
        end()


class _Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@USERS
@pytest.mark.parametrize("theirs", ["directory", "file", "mode"])
def test_no_commit_is_unpickled_that_others_can_have_written(user: int, theirs: str, shared: Path) -> None:
    commits, marker = shared / "commits" / "run-1", shared / "ran"
    CommitStore(commits).write({"pickled state": cloudpickle.dumps({"steps": _Touches(marker)})})
    (file,) = commits.glob("*.npz")
    for path, is_theirs in ((commits, theirs == "directory"), (file, theirs == "file")):
        os.chown(path, *[OTHER if is_theirs else user] * 2)
    os.chown(commits.parent, user, user)
    if theirs == "mode":
        commits.chmod(0o777)
    command = ["-np", 1, "--commit-dir", commits.parent, sys.executable, RANKS]
    with Running(*command, start=started_by(user)) as running:
        ended = running.end()
    assert ended.code == 1
    assert "ConfigError: " in ended.err
    assert f"must belong to this user (uid {user}) and be writable by nobody else" in ended.err
    assert not marker.exists()


def test_a_job_without_gates_says_what_others_can_do(shared: Path) -> None:
    start = [sys.executable, str(Path(__file__).with_name("without_gates.py")), *CHOROSRUN]
    script = shared / "script.py"
    script.write_text(WAITS)
    (shared / "end").touch()
    with Running("-np", 2, sys.executable, script, shared / "end", start=start) as running:
        ended = running.end()
    assert (ended.code, ended.out.count("sum 1")) == (0, 2), ended
    assert ended.err.count("another user of this machine could run commands as you") == 1


def test_mpirun_without_a_gate_runs_commands_of_another_user(shared: Path) -> None:
    """So the test above tries what would succeed."""
    marker = shared / "ran"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    with subprocess.Popen([mpirun, *root, "--oversubscribe", "-np", "1", "sleep", "30"]) as process:
        end = time.monotonic() + 20
        while not psutil.Process(process.pid).children() and time.monotonic() < end:
            time.sleep(0.05)
        sockets = psutil.Process(process.pid).net_connections("tcp")
        port = next(each.laddr.port for each in sockets if each.laddr.ip == "127.0.0.1")
        namespace = f"prterun-{os.uname().nodename}-{process.pid}@1"
        end = time.monotonic() + 20
        with spawning(os.geteuid(), namespace, port, marker):
            while not marker.exists() and time.monotonic() < end:
                time.sleep(0.05)
        process.terminate()
    assert marker.exists()
