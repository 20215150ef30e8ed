"""The check, before mpirun starts, that every remote host exists and accepts the login.
All at once, for a bounded time, with all reasons: mpirun tries one after the other, and reports little.
"""

import concurrent.futures
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from choros import durations
from choros.errors import HostUnreachable, LaunchError
from choros.launch.driver.machine import ask, printed
from choros.launch.plan.hosts import Host
from choros.launch.plan.job import Ssh

_AT_ONCE = 128
_LISTED = 4
#: Prints the host's name, what is unique to its kernel, and the device that is its shared memory.
_IDENTITY = "uname -n; cat /proc/sys/kernel/random/boot_id 2>/dev/null; stat -c %d /dev/shm 2>/dev/null; true"
_IDENTITY_LINES = 3


#: The lines that identify a host that was asked.
Identity = tuple[str, ...]
Answer = TypeVar("Answer")


def check_hosts(hosts: Sequence[Host], ssh: Ssh, seconds: float) -> None:
    """Raises ``HostUnreachable`` with the names of the ``hosts`` that cannot be reached within ``seconds``."""
    check_client(hosts, ssh)
    end = time.monotonic() + seconds
    names = [host.name for host in hosts]
    if not ssh.command:  # one missing host fails the job: do not wait for logins
        _, unknown = ask_all(names, _resolve, min(durations.NAME, seconds))
        if unknown:
            raise unreachable(unknown, len(names), ssh)
    left = max(1.0, end - time.monotonic())
    answers, failures = log_in_all(names, ssh, left)
    if failures:
        raise unreachable(failures, len(names), ssh)
    check_distinct(answers)


def check_client(hosts: Sequence[Host], ssh: Ssh) -> None:
    """Raises ``LaunchError`` if this machine lacks the program that logs in to ``hosts``."""
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


def log_in_all(names: Sequence[str], ssh: Ssh, seconds: float) -> tuple[dict[str, Identity], dict[str, str]]:
    """Returns the answers of the hosts that accept the login within ``seconds``, by name, and why others do not."""
    return ask_all(names, lambda name: _log_in(name, ssh, seconds), seconds)


def check_distinct(answers: Mapping[str, Identity]) -> None:
    """Raises ``HostUnreachable`` if two names are one machine: MPI's processes would overwrite each other's files."""
    own = subprocess.run(["sh", "-c", _IDENTITY], capture_output=True, text=True, check=False).stdout.splitlines()
    known = {tuple(own): "localhost"}
    for name, identity in answers.items():
        other = known.setdefault(identity, name) if len(identity) == _IDENTITY_LINES else name
        if other != name:
            raise HostUnreachable(
                f"{other} and {name} are one machine (or containers that share one) with the hostname "
                f"{identity[0]}: name it once, with all its slots, such as -H {other}:SLOTS, or give the "
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


def ask_all(
    names: Sequence[str], ask: Callable[[str], Answer], seconds: float
) -> tuple[dict[str, Answer], dict[str, str]]:
    """Returns the answers of hosts, by name, and why others cannot be used: ``ask`` failed, or took ``seconds``."""
    asked: dict[str, concurrent.futures.Future[Answer]] = {name: concurrent.futures.Future() for name in names}
    slots = threading.BoundedSemaphore(_AT_ONCE)

    def answer(name: str) -> None:
        with slots:
            try:
                asked[name].set_result(ask(name))
            except OSError as error:
                asked[name].set_exception(error)

    for name in names:  # daemon threads: a resolver that hangs must not delay this process's exit
        try:
            threading.Thread(target=answer, args=(name,), daemon=True).start()
        except RuntimeError as error:  # too many threads
            asked[name].set_exception(error)
    done, _ = concurrent.futures.wait(asked.values(), timeout=seconds)
    failures = {
        name: str(future.exception()) if future in done else f"no answer within {seconds:.0f} s"
        for name, future in asked.items()
        if future not in done or future.exception() is not None
    }
    return {name: future.result() for name, future in asked.items() if name not in failures}, failures


def _resolve(name: str) -> Identity:
    """Fails if ``name`` has no address, unless ssh's configuration maps it to another name."""
    if _has_address(name):
        return ()
    known = printed(["ssh", "-G", name], 5)
    settings = dict(line.split(" ", 1) for line in known.splitlines() if " " in line)
    alias = settings.get("hostname", name)
    if "proxycommand" in settings or "proxyjump" in settings or (alias != name and _has_address(alias)):
        return ()
    raise OSError("no such name")


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False


def _log_in(name: str, ssh: Ssh, seconds: float) -> Identity:
    """Runs a command on ``name``; raises an ``OSError`` if that is not possible."""
    argv = [*login(ssh, seconds), name, _IDENTITY]
    try:
        answer = ask(argv, seconds)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error
    if answer.returncode == 0:
        return tuple(answer.stdout.splitlines())
    raise OSError(last_line(answer.stderr) or f"{argv[0]} failed with exit code {answer.returncode}")


def login(ssh: Ssh, seconds: float) -> list[str]:
    """Returns the argv that logs in to a host, up to its name, and does not connect for longer than ``seconds``."""
    return ssh.argv() + ([] if ssh.command else ["-o", f"ConnectTimeout={max(1, int(min(10, seconds)))}"])


def last_line(text: str) -> str:
    """Returns the last line of ``text`` that is not blank; nothing if all are."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
