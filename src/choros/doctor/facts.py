"""The facts that the doctor knows of a machine, frozen values that become JSON, and how they are gathered on this one.
Nothing here fails: what cannot be read is a fact, too.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from choros import __version__, durations
from choros.errors import ChorosError, ConfigError
from choros.frameworks import FRAMEWORKS, choose_keras_backend, is_installed
from choros.launch.driver.machine import count_accelerators, detect_mpirun, own_names, printed
from choros.launch.plan.cores import allowed_processors, processor_quota, usable_cores
from choros.launch.plan.mpi_implementations import Mpirun
from choros.launch.processes.directories import SHARED_MEMORY, temporary
from choros.settings import ENGINES, Config

_MARK = "choros doctor:"
_IMPORT = f"import {{0}}; print(); print({_MARK!r}, getattr({{0}}, '__version__', 'of unknown version'))"
_MODULES = [module for _, module in ENGINES.values() if module]
_PROGRAMS = {
    **{name: _IMPORT.format(name) for name in (*FRAMEWORKS, "keras", *_MODULES)},
    "mpi4py": "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; " + _IMPORT.format("mpi4py"),
}
_DEVICES = (
    "import os; from choros.settings import Config; from choros.comm.devices import select_devices; "
    f"print({_MARK!r}, select_devices('mpi', 2, Config.from_environ(os.environ))[-1])"
)
_GPUS = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class PackageFacts:
    """A package's version; ``problem``: why its import fails. Without either it is not installed."""

    version: str = ""
    problem: str = ""

    @property
    def state(self) -> str:
        """The version, or why there is none."""
        return self.version or (f"broken ({self.problem})" if self.problem else "not installed")


@dataclass(frozen=True)
class DirectoryFacts:
    """A directory's file system, in bytes; ``problem``: why a file cannot be written there."""

    path: str
    size: int = 0
    free: int = 0
    problem: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """A machine as a job would find it. Of limits -1 is none; ``mpirun_problem``: why there is no mpirun."""

    name: str = ""
    python: str = ""
    executable: str = ""
    choros: str = ""
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)
    mpirun: str = ""
    mpirun_path: str = ""
    mpirun_problem: str = ""
    from_wheel: bool = False
    survives: bool = False
    shared_memory: DirectoryFacts | None = None
    temporary: DirectoryFacts = DirectoryFacts("")
    requested_temporary: str = ""
    current: DirectoryFacts = DirectoryFacts("")
    open_files: tuple[int, int] = (-1, -1)
    locked_memory: int = -1
    processes: int = -1
    fabric: bool = False
    cores: int = 1
    allowed: int = 1
    processors: int = 1
    quota: float | None = None
    numa_nodes: int = 0
    accelerators: int = 0
    gpus: tuple[str, ...] = ()
    gpu_problem: str = ""
    devices: str = ""
    settings_problem: str = ""
    loopback_problem: str = ""
    addresses: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MachineFacts:
        """Returns the facts that another machine, perhaps with another version of choros, has sent, made by ``asdict``.

        >>> from dataclasses import asdict
        >>> facts = MachineFacts(packages={"jax": PackageFacts("0.8")}, open_files=(64, 64))
        >>> MachineFacts.from_json({**asdict(facts), "later": 1}) == facts
        True
        """
        made = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        made = {name: tuple(value) if isinstance(value, list) else value for name, value in made.items()}
        for name in ("shared_memory", "temporary", "current"):
            if made.get(name) is not None:
                made[name] = DirectoryFacts(**made[name])
        packages = made.get("packages", {})
        return cls(**{**made, "packages": {name: PackageFacts(**package) for name, package in packages.items()}})


def gather(directory: str, mpirun_path: str | None) -> MachineFacts:
    """Returns the facts of this machine, for a job in ``directory`` that ``mpirun_path``, or the default, starts."""
    choose_keras_backend()
    mpirun, mpirun_problem = _mpirun(mpirun_path)
    environ = {**os.environ, **(mpirun.environment() if mpirun else {})}
    accelerators = count_accelerators()
    programs = {name: code for name, code in _PROGRAMS.items() if is_installed(name)}
    programs |= {"devices": _DEVICES} if accelerators else {}
    started = {name: _start(code, environ) for name, code in programs.items()}
    try:
        facts = _without_imports(directory, mpirun)
        end = time.monotonic() + durations.DOCTOR_IMPORTS
        packages = {name: _ended(process, end) for name, process in started.items()}
    finally:
        for process in started.values():
            if isinstance(process, subprocess.Popen):
                process.kill()
    devices = packages.pop("devices", PackageFacts())
    return replace(
        facts,
        packages=packages,
        mpirun_problem=mpirun_problem,
        accelerators=accelerators,
        devices=devices.state if accelerators else "",
    )


def _without_imports(directory: str, mpirun: Mpirun | None) -> MachineFacts:
    gpus = tuple(printed(_GPUS, durations.DOCTOR_PROGRAM).splitlines())
    return MachineFacts(
        name=platform.node(),
        python=platform.python_version(),
        executable=sys.executable,
        choros=__version__,
        mpirun=mpirun.version if mpirun else "",
        mpirun_path=mpirun.path if mpirun else "",
        from_wheel=mpirun is not None and mpirun.libmpi is None,
        survives=mpirun is not None and _survives(mpirun),
        shared_memory=_room(SHARED_MEMORY) if sys.platform == "linux" else None,
        temporary=_room(temporary()),
        requested_temporary=os.environ.get("TMPDIR", ""),
        current=_room(Path(directory)),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=_processes(),
        fabric=any(Path("/sys/class/infiniband").glob("*")),
        cores=usable_cores(),
        allowed=len(allowed_processors()),
        processors=os.cpu_count() or 1,
        quota=processor_quota(),
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        gpus=gpus,
        gpu_problem="" if gpus or shutil.which(_GPUS[0]) is None else "nvidia-smi is installed, but lists no GPU",
        settings_problem=_problem(lambda: Config.from_environ(os.environ)),
        loopback_problem=_problem(_connect_to_itself),
        addresses=_addresses(),
    )


def working_directory() -> str:
    """Returns the directory in which a job would run, also if it has been removed."""
    try:
        return os.getcwd()
    except OSError:
        return os.environ.get("PWD", os.curdir)


def _mpirun(path: str | None) -> tuple[Mpirun | None, str]:
    try:
        return detect_mpirun(path), ""
    except ChorosError as error:
        return None, str(error)


def _survives(mpirun: Mpirun) -> bool:
    """Returns whether ranks can outlive others: this Open MPI has ULFM. Without ``ompi_info`` its version says so."""
    if not mpirun.implementation.surviving:
        return False
    known = printed([str(Path(mpirun.path).with_name("ompi_info"))], durations.DOCTOR_PROGRAM)
    return not known or "FT MPI support: yes" in known


def _start(code: str, environ: Mapping[str, str]) -> subprocess.Popen[str] | PackageFacts:
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
        )
    except OSError as error:
        return PackageFacts(problem=f"no process can be started: {error.strerror}")


def _ended(process: subprocess.Popen[str] | PackageFacts, end: float) -> PackageFacts:
    """Returns what a process of ``_start`` has found out at its end, or at ``end``, when it is killed."""
    if isinstance(process, PackageFacts):
        return process
    with process:
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            return PackageFacts(problem=f"its import takes more than {durations.DOCTOR_IMPORTS:g} s")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line.removeprefix(_MARK).strip() for line in lines if line.startswith(_MARK)]
    if process.returncode == 0 and found:
        return PackageFacts(found[-1])
    if process.returncode < 0:
        return PackageFacts(problem=f"its import was ended by {signal.Signals(-process.returncode).name}")
    return PackageFacts(problem=lines[-1] if lines else f"its import ended with exit code {process.returncode}")


def _room(path: Path) -> DirectoryFacts:
    """Returns the room in a directory, after writing to a file there."""
    size = free = 0

    def write() -> None:
        nonlocal size, free
        status = os.statvfs(path)
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))

    problem = _problem(write)
    return DirectoryFacts(str(path), size, free, problem)


def _processes() -> int:
    """Returns how many processes and threads are allowed: this user, and in this container beside those that run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft != resource.RLIM_INFINITY and os.geteuid() != 0 else []
    for group in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/pids")):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limits.append(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    return min(limits, default=-1)


def _problem(act: Callable[[], object]) -> str:
    """Returns why ``act`` fails; empty if it does not."""
    try:
        act()
    except ConfigError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _connect_to_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=durations.DOCTOR_REACH).close()


def _addresses() -> tuple[str, ...]:
    """Returns the addresses of this machine by which others may reach it."""
    found = []
    for name in sorted(own_names()):
        with contextlib.suppress(ValueError):
            address = ip_address(name)
            found += [] if address.is_loopback or address.is_link_local else [name]
    return tuple(found)
