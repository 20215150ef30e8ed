"""The servers of one process of pytest, which end with it."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

__all__ = ["warm_python"]

TESTS = Path(__file__).parent.parent
NAMES = ("0", "1")
_servers = ExitStack()
atexit.register(_servers.close)


@cache
def warm_python(framework: str, path: str) -> tuple[str, ...]:
    """The command that runs a script, as ``sys.executable`` does, in a process that has imported the framework.

    Args:
        framework: that of Keras.
        path: the PYTHONPATH of the script.
    """
    directory = Path(tempfile.mkdtemp(prefix="choros-tests-"))
    _servers.callback(shutil.rmtree, directory, ignore_errors=True)
    environ = {
        **os.environ,
        "KERAS_BACKEND": framework,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([path, str(TESTS)]),
    }
    modules = (framework, "keras", "choros.keras", f"choros.{framework}", "choros.distribute")
    servers = {name: _servers.enter_context(_server(directory / name, modules, environ)) for name in NAMES}
    end = time.monotonic() + 120
    while missing := [server for name, server in servers.items() if not (directory / name).exists()]:
        assert all(server.poll() is None for server in missing), "a server has ended: its error is in the output"
        assert time.monotonic() < end, f"no server in {directory}"
        time.sleep(0.05)
    return sys.executable, "-I", "-S", str(TESTS / "warm" / "client.py"), str(directory)


@contextmanager
def _server(address: Path, modules: tuple[str, ...], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """It ends when its standard input does, as when this process is killed."""
    command = [sys.executable, "-P", str(TESTS / "warm" / "server.py"), str(address), *modules]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, start_new_session=True) as server:
        yield server
