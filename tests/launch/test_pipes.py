"""The pipes between wrappers and chorosrun."""

import os
import resource

import pytest

from choros.launch.processes.directories import SESSION
from choros.launch.processes.pipes import enlarge, frame_pipes, open_frame_pipe
from choros.launch.protocol.wrapper_options import JOB


@pytest.fixture
def session(tmp_path, monkeypatch):
    """The directory of the job ``name``."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = tmp_path / f"{SESSION}name"
    path.mkdir()
    return path


def opened(rank, job="name"):
    return open_frame_pipe({JOB: job}, rank)


def test_a_wrapper_finds_the_pipe_of_its_rank(session):
    with frame_pipes(session, 2) as pipes:
        writers = [opened(rank) for rank in range(2)]
        os.write(writers[1], b"1")
        os.write(writers[0], b"0")
        assert [os.read(pipe, 9) for pipe in pipes] == [b"0", b"1"]
        for writer in writers:
            os.close(writer)
        with pytest.raises(BlockingIOError):  # no end: the wrapper of a restarted rank may come
            os.read(pipes[0], 9)
        assert opened(2) is None
        assert opened(0, job="other") is None
    assert opened(0) is None  # chorosrun has ended


def test_a_wrapper_writes_to_nothing_but_a_pipe_of_this_user(session, monkeypatch):
    (session / "frames.0").write_text("a file")
    assert opened(0) is None
    (session / "frames.1").symlink_to(session / "frames.2")
    with frame_pipes(session / "..", 3):
        assert opened(1) is None
    (session / "frames.0").unlink()
    with frame_pipes(session, 1):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert opened(0) is None


def test_pipes_take_half_of_the_files_at_most(session, monkeypatch):
    used = os.dup(0)
    os.close(used)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * (used + 3), 2 * (used + 3)))
    with frame_pipes(session, 10) as pipes:
        assert 0 < len(pipes) <= 3
        assert len(list(session.iterdir())) == len(pipes)


def test_without_a_directory_there_are_no_pipes(tmp_path):
    with frame_pipes(tmp_path / "none", 2) as pipes:
        assert pipes == []


@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 1 << 18), (128, 1 << 17), (1000, 1 << 16)])
def test_pipes_of_many_ranks_are_smaller(ranks, nbytes):
    fcntl = pytest.importorskip("fcntl")
    if not hasattr(fcntl, "F_GETPIPE_SZ"):
        pytest.skip("only Linux has pipes of other sizes")
    reader, writer = os.pipe()
    enlarge(reader, ranks)
    assert fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) == nbytes
    os.close(reader)
    os.close(writer)
