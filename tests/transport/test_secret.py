"""The key of a job: from the environment, or from a file that only this user can read."""

import os
import tempfile

import pytest

from choros.errors import ConfigError
from choros.transport.secret import Key, job_key, key_of_user

LOCAL, REMOTE = ["127.0.0.1:1", "localhost:2"], ["127.0.0.1:1", "node1:2"]


@pytest.fixture
def environ(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return {"XDG_CACHE_HOME": str(tmp_path)}


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "choros" / "key"


def test_the_environment_has_the_key_of_a_job_anywhere(environ):
    assert job_key({"CHOROS_SECRET": "ab" * 16}, REMOTE) == Key(b"\xab" * 16)
    with pytest.raises(ConfigError, match="node1:2 can be reached from other hosts"):
        job_key(environ, REMOTE)
    for wrong in ("xyz", "ab"):
        with pytest.raises(ConfigError, match="32 hexadecimal digits"):
            job_key({"CHOROS_SECRET": wrong}, LOCAL)
    assert "abab" not in repr(Key(b"abab"))


def test_a_job_on_one_host_has_the_key_of_the_user(environ, directory):
    key = job_key(environ, LOCAL)
    assert key == job_key(environ, LOCAL)
    assert (len(key.secret), key.within_host) == (32, True)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in directory.iterdir()] == ["secret"]


def readable_by_the_group(directory):
    (directory / "secret").chmod(0o640)


def open_directory(directory):
    directory.chmod(0o755)


def of_someone_else(directory):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(directory / "secret", 12345, -1)


def short(directory):
    (directory / "secret").write_bytes(b"123")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (readable_by_the_group, "its mode 640"),
        (open_directory, "its mode 755"),
        (of_someone_else, "its owner is 12345"),
        (short, "is no key of choros"),
    ],
)
def test_a_file_that_others_could_have_read_or_replaced_is_refused(environ, directory, spoil, message):
    key_of_user(environ)
    spoil(directory)
    with pytest.raises(ConfigError, match=message):
        key_of_user(environ)


@pytest.mark.parametrize("what", ["directory", "file"])
def test_a_symbolic_link_is_not_followed(environ, directory, tmp_path, what):
    others = tmp_path / "others"
    key_of_user({"XDG_CACHE_HOME": str(others)})
    if what == "directory":
        directory.parent.mkdir()
        directory.symlink_to(others / "choros" / "key")
    else:
        directory.mkdir(parents=True, mode=0o700)
        (directory / "secret").symlink_to(others / "choros" / "key" / "secret")
    assert key_of_user(environ) != key_of_user({"XDG_CACHE_HOME": str(others)})


def test_without_a_writable_home_the_key_is_in_a_directory_of_the_user(environ, tmp_path):
    (tmp_path / "file").touch()
    environ["XDG_CACHE_HOME"] = str(tmp_path / "file")
    key = key_of_user(environ)
    assert key == key_of_user(environ)
    directory = tmp_path / "tmp" / f"choros-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rename(tmp_path / "moved")
    directory.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="can be kept neither"):
        key_of_user(environ)
