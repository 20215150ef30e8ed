"""The examples, started as users start them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from harness import CHOROSRUN, ROOT, TESTS, skip_if_left_out
from ranks.environment import ONE_THREAD, QUICK, python_path
from warm.servers import warm_python


@dataclass(frozen=True)
class Job:
    """A running example, under ``chorosrun`` if it has several ranks."""

    launcher: subprocess.Popen[str]

    @classmethod
    def start(
        cls, example: str, *arguments: object, framework: str, cache: Path, ranks: int = 2, servers: int = 0
    ) -> Job:
        """Starts ``examples/{example}.py``, or ``several.py``; the bundled digits are cached in ``cache``.

        With parameter ``servers``, ``ranks`` is the number of workers.
        """
        skip_if_left_out(framework)
        directory = TESTS if example == "several" else ROOT
        command = [*warm_python(framework), str(directory / "examples" / f"{example}.py"), *map(str, arguments)]
        if servers:
            command = [CHOROSRUN, "--ps", str(servers), "-np", str(ranks), *command]
        elif ranks > 1:
            command = [CHOROSRUN, "-np", str(ranks), *command]
        environment = {
            **os.environ,
            "KERAS_BACKEND": framework,
            **QUICK,
            **({} if ranks > 1 or servers else ONE_THREAD),
            "XDG_CACHE_HOME": str(cache),
            "PYTHONPATH": python_path(),
        }
        return cls(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )

    def wait(self) -> str:
        """Waits until the job ends, and asserts that it succeeds.

        Returns:
            The output of all ranks.
        """
        output, _ = self.launcher.communicate()
        assert self.launcher.returncode == 0, output
        return output

    def kill(self) -> None:
        """Kills the launcher and all ranks with ``kill -9``, so that no process can clean up."""
        if self.launcher.poll() is None:
            launcher = psutil.Process(self.launcher.pid)
            for process in [*launcher.children(recursive=True), launcher]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with self.launcher:  # closes the pipe and waits
            pass
