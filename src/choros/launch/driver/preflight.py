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
from collections.abc import Callable, Sequence

from choros.errors import HostUnreachable, LaunchError
from choros.launch.plan.hosts import Host
from choros.launch.plan.job import Ssh

__all__ = ["check_hosts", "unreachable"]

_NAME_SECONDS = 6.0
_AT_ONCE = 128
_LISTED = 4


def check_hosts(hosts: Sequence[Host], ssh: Ssh, seconds: float) -> None:
    """Raises ``HostUnreachable`` with the names of the ``hosts`` that cannot be reached within ``seconds``."""
    if not hosts:
        return
    program = ssh.argv()[0]
    if shutil.which(program) is None:
        what = (
            "no ssh client is installed on this machine"
            if ssh.command is None
            else f"--ssh-command {program}: no such program"
        )
        raise LaunchError(
            f"{what}, and {hosts[0].name} is a remote host. Install an ssh client, or give another program with "
            "--ssh-command."
        )
    end = time.monotonic() + seconds
    names = [host.name for host in hosts]
    failures: dict[str, str] = {}
    if ssh.command is None:
        failures = _try_all(names, lambda name: _resolve(name), min(_NAME_SECONDS, seconds))
    found = [name for name in names if name not in failures]
    if found and not failures:  # one missing host fails the job: do not wait for logins
        left = max(1.0, end - time.monotonic())
        failures = _try_all(found, lambda name: _log_in(name, ssh, left), left)
    if failures:
        raise unreachable(failures, len(hosts), ssh)


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


def _try_all(names: Sequence[str], attempt: Callable[[str], str], seconds: float) -> dict[str, str]:
    """Returns name → reason for the hosts that failed; a host without an answer after ``seconds`` has failed."""
    answers: dict[str, concurrent.futures.Future[str]] = {name: concurrent.futures.Future() for name in names}
    slots = threading.BoundedSemaphore(_AT_ONCE)

    def answer(name: str) -> None:
        with slots:
            answers[name].set_result(attempt(name))

    for name in names:  # daemon threads: a resolver that hangs must not delay this process's exit
        threading.Thread(target=answer, args=(name,), daemon=True).start()
    concurrent.futures.wait(answers.values(), timeout=seconds)
    late = f"no answer within {seconds:.0f} s"
    outcomes = {name: future.result() if future.done() else late for name, future in answers.items()}
    return {name: why for name, why in outcomes.items() if why}


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


def _log_in(name: str, ssh: Ssh, seconds: float) -> str:
    """Returns why ``true`` cannot be run on ``name``; empty if it can."""
    argv = ssh.argv()
    if ssh.command is None:
        argv += ["-o", f"ConnectTimeout={max(1, int(min(10, seconds)))}"]
    try:
        answer = subprocess.run(
            [*argv, name, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return str(error)
    if answer.returncode == 0:
        return ""
    lines = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"{argv[0]} failed with exit code {answer.returncode}"
