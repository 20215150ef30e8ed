"""The processes that have imported a framework, of which ranks are copies: all workers of pytest-xdist share them.

The first test that wants one starts it. They end with the process of pytest that has made their directory, since their
standard input does, a named pipe that it keeps open.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ranks.environment import CACHE, QUICK, python_path
from ranks.job import HIDDEN, unwanted

__all__ = ["open_directory", "warm_python"]

CLIENT, SERVER = (str(Path(__file__).with_name(name)) for name in ("client.py", "server.py"))
#: The environment variable with the directory of the servers.
DIRECTORY = "CHOROS_TEST_SERVERS"
#: Two for each framework: sets have another order in each.
NAMES = ("0", "1")
LIFE, LOCK, ALIVE = "life", "lock", "alive"


def open_directory() -> Path:
    """Makes the directory of the servers that this process and those that it starts use, until this one ends."""
    directory = Path(tempfile.mkdtemp(prefix="choros-tests-"))
    os.mkfifo(directory / LIFE)
    (directory / ALIVE).touch()
    life = os.open(directory / LIFE, os.O_RDWR | os.O_CLOEXEC)  # ends with this process, even if it is killed
    os.environ[DIRECTORY] = str(directory)
    atexit.register(_end, directory, life)
    return directory


def _end(directory: Path, life: int) -> None:
    os.close(life)
    with _locked(directory / ALIVE):  # each server has it
        shutil.rmtree(directory, ignore_errors=True)


@cache
def warm_python(framework: str) -> tuple[str, ...]:
    """The command that runs a script, as ``sys.executable`` does, in a process that has imported Keras' framework."""
    if DIRECTORY not in os.environ:
        open_directory()
    directory = Path(os.environ[DIRECTORY], framework)
    directory.mkdir(exist_ok=True)
    with _locked(directory / LOCK):
        if not all((directory / name).exists() for name in NAMES):
            _start(framework, directory)
    return sys.executable, "-I", "-S", CLIENT, str(directory)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(framework: str, directory: Path) -> None:
    keras = {"KERAS_BACKEND": framework, "PYTHONPATH": python_path(), HIDDEN: " ".join(unwanted(framework))}
    modules = (framework, "keras", "choros.keras", f"choros.{framework}", "choros.distribute", "pytest")
    servers = []
    with (directory.parent / LIFE).open("rb", buffering=0) as life:
        for name in NAMES:
            command = [sys.executable, "-P", SERVER, str(directory / name), str(directory.parent / ALIVE), *modules]
            environ = {**os.environ, **QUICK, **CACHE, **keras}
            servers.append(subprocess.Popen(command, env=environ, stdin=life, start_new_session=True))
    end = time.monotonic() + 120
    while not all((directory / name).exists() for name in NAMES):
        assert all(server.poll() is None for server in servers), "a server has ended: its error is in the output"
        assert time.monotonic() < end, f"no server in {directory}"
        time.sleep(0.05)
    _started.extend(servers)


#: Which this process does not wait for.
_started: list[subprocess.Popen[bytes]] = []
