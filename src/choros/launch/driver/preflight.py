"""The check, before mpirun starts, that every remote host exists and accepts the login.

mpirun tries hosts one after the other and reports little when a host does not answer. This check tries all hosts at
once, for a bounded time, and raises one error with the hosts that failed and the reasons.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from choros.errors import HostUnreachable, LaunchError
from choros.launch.plan.hosts import Host
from choros.launch.plan.job import Ssh

__all__ = ["answering", "check_hosts", "unreachable"]

_NAME_SECONDS = 6.0
_AT_ONCE = 128
_LISTED = 4
#: Prints the host's name, what is unique to its kernel, and the device that is its shared memory.
_IDENTITY = "uname -n; cat /proc/sys/kernel/random/boot_id 2>/dev/null; stat -c %d /dev/shm 2>/dev/null; true"
_IDENTITY_LINES = 3


@dataclass(frozen=True)
class _Answer:
    """A host's answer: why it cannot be used (empty: it can), or the lines that identify it."""

    problem: str = ""
    identity: tuple[str, ...] = ()


def check_hosts(hosts: Sequence[Host], ssh: Ssh, seconds: float) -> None:
    """Raises ``HostUnreachable`` with the names of the ``hosts`` that cannot be reached within ``seconds``."""
    if not hosts:
        return
    program = ssh.argv()[0]
    if shutil.which(program) is None:
        what = (
            "no ssh client is installed on this machine"
            if not ssh.command
            else f"--ssh-command {program}: no such program"
        )
        raise LaunchError(
            f"{what}, and {hosts[0].name} is a remote host. Install an ssh client, or give another program with "
            "--ssh-command."
        )
    end = time.monotonic() + seconds
    names = [host.name for host in hosts]
    if not ssh.command:
        answers = _ask_all(names, lambda name: _Answer(_resolve(name)), min(_NAME_SECONDS, seconds))
        _check(answers, ssh)  # one missing host fails the job: do not wait for logins
    left = max(1.0, end - time.monotonic())
    answers = _ask_all(names, lambda name: _log_in(name, ssh, left), left)
    _check(answers, ssh)
    _check_distinct(answers)


def answering(hosts: Sequence[Host], ssh: Ssh, seconds: float) -> tuple[Host, ...]:
    """Returns those of the ``hosts`` that accept the login within ``seconds``."""
    answers = _ask_all([host.name for host in hosts], lambda name: _log_in(name, ssh, seconds), seconds)
    return tuple(host for host in hosts if not answers[host.name].problem)


def _check(answers: Mapping[str, _Answer], ssh: Ssh) -> None:
    failures = {name: answer.problem for name, answer in answers.items() if answer.problem}
    if failures:
        raise unreachable(failures, len(answers), ssh)


def _check_distinct(answers: Mapping[str, _Answer]) -> None:
    """Raises ``HostUnreachable`` if two names are one machine: MPI's processes would overwrite each other's files."""
    own = subprocess.run(["sh", "-c", _IDENTITY], capture_output=True, text=True, check=False).stdout.splitlines()
    known = {tuple(own): "localhost"}
    for name, answer in answers.items():
        other = known.setdefault(answer.identity, name) if len(answer.identity) == _IDENTITY_LINES else name
        if other != name:
            raise HostUnreachable(
                f"{other} and {name} are one machine (or containers that share one) with the hostname "
                f"{answer.identity[0]}: name it once, with all its slots, such as -H {other}:SLOTS, or give the "
                "containers different hostnames."
            )


def unreachable(failures: dict[str, str], total: int, ssh: Ssh) -> HostUnreachable:
    """Returns the error that lists the hosts in ``failures`` (name → reason) and says what to check."""
    listed = "; ".join(f"{name}: {why}" for name, why in list(failures.items())[:_LISTED])
    more = f"; and {len(failures) - _LISTED} more" if len(failures) > _LISTED else ""
    first = next(iter(failures))
    login = " ".join([*ssh.argv(), first, "true"])
    of = "the host" if total == 1 else f"{len(failures)} of {total} hosts"
    return HostUnreachable(
        f"{of} cannot be reached ({listed}{more}). Check the spelling, and that this works without a prompt: {login}"
    )


def _ask_all(names: Sequence[str], ask: Callable[[str], _Answer], seconds: float) -> dict[str, _Answer]:
    """Returns name → answer; a host without an answer after ``seconds`` cannot be used."""
    answers: dict[str, concurrent.futures.Future[_Answer]] = {name: concurrent.futures.Future() for name in names}
    slots = threading.BoundedSemaphore(_AT_ONCE)

    def answer(name: str) -> None:
        with slots:
            answers[name].set_result(ask(name))

    for name in names:  # daemon threads: a resolver that hangs must not delay this process's exit
        threading.Thread(target=answer, args=(name,), daemon=True).start()
    concurrent.futures.wait(answers.values(), timeout=seconds)
    late = _Answer(f"no answer within {seconds:.0f} s")
    return {name: future.result() if future.done() else late for name, future in answers.items()}


def _resolve(name: str) -> str:
    """Returns why ``name`` has no address; empty if it has one, or if ssh's configuration maps it to another name."""
    if _has_address(name):
        return ""
    try:
        known = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        known = ""
    settings = dict(line.split(" ", 1) for line in known.splitlines() if " " in line)
    alias = settings.get("hostname", name)
    if "proxycommand" in settings or "proxyjump" in settings or (alias != name and _has_address(alias)):
        return ""
    return "no such name"


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def _log_in(name: str, ssh: Ssh, seconds: float) -> _Answer:
    """Runs a command on ``name``."""
    argv = ssh.argv()
    if not ssh.command:
        argv += ["-o", f"ConnectTimeout={max(1, int(min(10, seconds)))}"]
    try:
        answer = subprocess.run(
            [*argv, name, _IDENTITY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Answer(f"no answer within {seconds:.0f} s")
    except OSError as error:
        return _Answer(str(error))
    if answer.returncode == 0:
        return _Answer(identity=tuple(answer.stdout.splitlines()))
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    return _Answer(lines[-1] if lines else f"{argv[0]} failed with exit code {answer.returncode}")
