"""Files that are complete at any time: what processes leave that were killed, and what file systems cannot do."""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from choros import durable
from choros.durable import discard, unfinished
from choros.errors import ConfigError

HOST = os.uname().nodename


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_error_leaves_the_last_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    path.write_text("last")

    def fail() -> None:
        with unfinished(path) as name:
            name.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "last"
    assert names(tmp_path) == ["model.txt"]


def test_what_is_written_to_a_pipe_replaces_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with unfinished(pipe) as name:
        name.write_text("record")
    assert os.read(reader, 100) == b"record"
    assert pipe.is_fifo()
    os.close(reader)
    reader, writer = os.pipe()  # as of ``choros … --json /dev/stdout | jq``
    with unfinished(f"/dev/fd/{writer}") as name:
        name.write_text("record")
    assert os.read(reader, 100) == b"record"
    for each in (reader, writer):
        os.close(each)


def test_what_is_written_to_an_open_file_does_not_take_its_place(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w+") as output:  # as of ``choros … --json /dev/stdout > output``
        os.symlink(f"/dev/fd/{output.fileno()}", tmp_path / "link")
        for name in (f"/proc/self/fd/{output.fileno()}", tmp_path / "link"):
            with unfinished(name) as path:
                path.write_text(f"record of {name}")
            assert output.seek(0) == 0
            assert output.read() == f"record of {name}"


def test_the_next_write_removes_what_killed_processes_have_left_and_nothing_of_living_ones(tmp_path: Path) -> None:
    killed = (
        "import os, signal, sys; from choros.durable import unfinished\n"
        "with unfinished(sys.argv[1]) as name:\n"
        "    name.write_text('unfinished'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path / "model.txt"], check=False)
    assert len(names(tmp_path)) == 1
    other = tmp_path / ".unfinished.another-host.x"
    (other / "part").mkdir(parents=True)
    other.chmod(0o1700)
    with unfinished(tmp_path / "one.txt") as one:
        with unfinished(tmp_path / "two.txt") as two:
            two.write_text("2")
        one.write_text("1")
    assert names(tmp_path) == [other.name, "one.txt", "two.txt"]
    long_ago = time.time() - 2 * 24 * 3600
    for path in (other / "part", other):
        os.utime(path, (long_ago, long_ago))
    with unfinished(tmp_path / "one.txt") as one:
        one.write_text("1")
    assert names(tmp_path) == ["one.txt", "two.txt"]


def test_what_others_plant_beside_it_is_neither_waited_for_nor_used(tmp_path: Path) -> None:
    prefix = f".unfinished.{os.uname().nodename}."
    os.mkfifo(tmp_path / f"{prefix}pipe")
    private = tmp_path / "private"
    private.mkdir()
    (private / ".former").mkdir()
    (private / "thesis").write_text("mine")
    (tmp_path / f"{prefix}link").symlink_to(private)
    with unfinished(tmp_path / "one.txt") as one:
        one.write_text("1")
    assert names(private) == [".former", "thesis"]
    assert (tmp_path / "one.txt").read_text() == "1"


def test_a_directory_that_others_have_renamed_is_not_removed(tmp_path: Path) -> None:
    """As all who can write in the directory above can: that of a group, for example."""
    own = tmp_path / "thesis"
    own.mkdir()
    (own / "chapter").write_text("mine")
    own = own.rename(tmp_path / f".unfinished.{HOST}.x")
    with unfinished(tmp_path / "one.txt") as one:
        one.write_text("1")
    assert (own / "chapter").read_text() == "mine"
    (own / "chapter").unlink()
    with unfinished(tmp_path / "one.txt") as one:
        one.write_text("1")
    assert names(tmp_path) == ["one.txt"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_another_users_link_in_a_directory_for_all_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    for owner, follows in ((71001, False), (0, True)):
        link = shared / f"model-{owner}.txt"
        link.symlink_to(tmp_path / "precious")
        os.lchown(link, owner, owner)
        with nullcontext() if follows else pytest.raises(ConfigError, match="another user"), unfinished(link) as name:
            name.write_text("weights")
        assert (tmp_path / "precious").read_text() == ("weights" if follows else "mine")


def test_directories_are_replaced_where_their_names_cannot_be_exchanged(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(durable, "_exchanged", lambda one, other: False)
    path = tmp_path / "saved"
    for text in ("1", "2"):
        with unfinished(path) as name:
            name.mkdir()
            (name / "weights").write_text(text)
        assert (path / "weights").read_text() == text
        assert names(tmp_path) == ["saved"]
    # A process that was killed between the two renames.
    left = tmp_path / f".unfinished.{HOST}.x"
    left.mkdir()
    left.chmod(0o1700)
    path.replace(left / ".former")
    (left / "saved").mkdir()
    (left / "saved" / "weights").write_text("3")
    with unfinished(tmp_path / "other") as name:
        name.write_text("")
    assert names(tmp_path) == ["other", "saved"]
    assert (path / "weights").read_text() == "3"


def test_a_directory_is_discarded_at_once(tmp_path: Path) -> None:
    (tmp_path / "backup").mkdir()
    (tmp_path / "backup" / "weights").write_text("1")
    discard(tmp_path / "backup")
    assert names(tmp_path) == []
