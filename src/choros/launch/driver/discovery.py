"""Runs the host discovery script of an elastic job."""

from __future__ import annotations

import os
import subprocess

from choros.errors import ConfigError

__all__ = ["run_script"]

_SECONDS = 30.0


def run_script(script: str) -> str:
    """Returns what ``script`` prints.

    Raises:
        ConfigError: it cannot be run, fails, or does not end in time.
    """
    path = script if os.path.dirname(script) else os.path.join(os.curdir, script)
    try:
        ended = subprocess.run(
            [path], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except OSError as error:
        raise ConfigError(f"--host-discovery-script {script}: it cannot be run: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--host-discovery-script {script}: it did not end within {_SECONDS:g} s.") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"--host-discovery-script {script}: it ended with exit code {error.returncode}: {error.stderr.strip()}"
        ) from error
    return ended.stdout
