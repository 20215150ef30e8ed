"""A job's directories, and the removal of those whose job was killed as a whole."""

import fcntl
import os
import subprocess
import sys

import pytest

from choros.errors import LaunchError
from choros.launch.processes.directories import VARIABLE, Directory, job_directories, remove_stale, shared_memory
from choros.launch.protocol.wrapper_options import JOB


def test_the_last_rank_removes_it(tmp_path):
    first, second = (shared_memory({JOB: "a1"}, 1, [tmp_path]) for _ in range(2))
    assert first.path == second.path == tmp_path / "choros-job-a1"
    assert first.path.stat().st_mode & 0o7777 == 0o1700
    for rank in (0, 1):
        (first.path / f"segment.{rank}").touch()
    first.release(".0")
    assert [path.name for path in first.path.iterdir()] == ["segment.1"]
    second.release(".1")
    assert not first.path.exists()


def test_the_users_own_directory_is_unchanged(tmp_path):
    assert shared_memory({JOB: "a1", VARIABLE: "/elsewhere"}, 1, [tmp_path]) is None
    assert shared_memory({}, 1, [tmp_path]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_not_used(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "choros-job-a1").symlink_to(tmp_path / "target")
    assert shared_memory({JOB: "a1"}, 1, [tmp_path]) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.timeout(10)
def test_another_users_lock_is_not_waited_for(tmp_path):
    taken = tmp_path / "choros-job-a1"
    taken.mkdir()
    os.chown(taken, 71001, 71001)
    lock = os.open(taken, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert shared_memory({JOB: "a1"}, 1, [tmp_path]) is None
    os.close(lock)


def test_it_is_where_there_is_room_for_all_ranks(tmp_path):
    (tmp_path / "a").mkdir()
    roots = [tmp_path / "missing", tmp_path / "a"]
    assert shared_memory({JOB: "a1"}, 1, roots).path == tmp_path / "a" / "choros-job-a1"
    assert shared_memory({JOB: "a1"}, 1 << 40, roots) is None


def test_only_unlocked_directories_are_stale(tmp_path):
    hold = (
        "import sys; from pathlib import Path; from choros.launch.processes.directories import Directory;"
        "d = Directory.acquire(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    held = tmp_path / "choros-job-held"
    for stale in (tmp_path / "choros-job-stale", tmp_path / "choros-session-stale"):
        stale.mkdir()
        stale.chmod(0o1700)
        (stale / "deep").mkdir()
    (tmp_path / "choros-unrelated").mkdir()
    command = [sys.executable, "-c", hold, str(held)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        remove_stale(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["choros-job-held", "choros-unrelated"]
        other.kill()
        other.wait()
        remove_stale(tmp_path)
    assert os.listdir(tmp_path) == ["choros-unrelated"]


def test_a_directory_that_others_have_renamed_is_not_stale(tmp_path):
    """As they can where all can write, and no sticky bit forbids it."""
    for kind in ("session", "job"):
        own = tmp_path / f"choros-{kind}-0123456789ab"
        own.mkdir(mode=0o700)
        (own / "chapter").write_text("mine")
    remove_stale(tmp_path)
    assert len(list(tmp_path.glob("*/chapter"))) == 2


def test_a_directory_that_another_job_has_removed_and_a_new_one_made_again_is_not_stale(tmp_path, monkeypatch):
    path, lock, made = tmp_path / "choros-job-a", fcntl.flock, []
    path.mkdir()

    def late(descriptor, operation):
        if operation & fcntl.LOCK_EX and not made:
            path.rmdir()
            made.append(Directory.acquire(path))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    remove_stale(tmp_path)
    assert made[0].path.exists()


def test_the_directory_of_a_daemon_that_was_killed_is_stale_with_its_job(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    daemons = [tmp_path / "prted.1", tmp_path / "prted.2"]
    jobs = [shared_memory({JOB: name}, 1, [tmp_path]) for name in "ab"]
    for job, daemon in zip(jobs, daemons, strict=True):
        daemon.mkdir()
        job.note_daemon(daemon)
        (job.path / "segment.0").touch()
    jobs[0].release(".0")
    os.close(jobs[1]._descriptor)  # it was killed
    assert sorted(os.listdir(tmp_path)) == ["choros-job-b", "prted.1", "prted.2"]
    remove_stale(tmp_path)
    assert os.listdir(tmp_path) == ["prted.1"]  # its daemon removes it


def test_the_directories_of_a_job_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with job_directories(["a name"]) as (name, session):
        assert name == "a name"
        assert {path.name for path in tmp_path.iterdir()} == {"choros-session-a name", "choros-job-a name"}
        (session / "file").touch()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["job", "session"])
def test_a_name_that_somebody_has_taken_is_not_used(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    planted = tmp_path / f"choros-{kind}-planted"
    planted.symlink_to(tmp_path)
    with job_directories(["planted", "free"]) as (name, _):
        assert name == "free"
        assert {path.name for path in tmp_path.iterdir()} == {planted.name, "choros-session-free", "choros-job-free"}
    with pytest.raises(LaunchError, match="another user of this machine makes"), job_directories(["planted"]):
        pass
    assert list(tmp_path.iterdir()) == [planted]
