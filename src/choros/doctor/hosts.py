"""The other hosts: whether they accept the login, what they are, and whether all reach each other. This program answers
there, in a login of the doctor's.

::

    doctor                                     host
      ◄────────────────────────────── clock ────┤
      ◄──────────── facts, port, secret ────────┤  ⎫
      ├── the other hosts' ports and secrets ──►   ⎬ it listens
      ◄──────────── hosts that it misses ───────┤  ⎪
      ├── end of its input ────────────────────►   ⎭

Each host listens at a free port, the doctor's too, and all others connect to it: a listener with another secret, or
none, is not that host.
"""

import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from choros import durations
from choros.doctor.checks import OK, PROBLEM, Finding, clock_ahead, compare
from choros.doctor.facts import MachineFacts, gather, working_directory
from choros.errors import LaunchError
from choros.launch.driver.preflight import ask_all, check_client, check_distinct, last_line, log_in_all, login
from choros.launch.plan.job import Job, Ssh
from choros.transport.channel import listen

#: What a host's facts depend on, of the environment that the job's ranks inherit.
_INHERITED = ("PYTHONPATH", "LD_LIBRARY_PATH", "KERAS_BACKEND", "TMPDIR")
_HERE = "this machine"
#: Begins each line for the doctor: a login shell may print others.
_MARK = "choros doctor: "


class Target(NamedTuple):
    """A listener on a host: it can be reached if one of the ``addresses`` can."""

    host: str
    addresses: Sequence[str]
    port: int
    secret: str


@contextmanager
def listening() -> Iterator[tuple[int, str]]:
    """A block in which all who connect to a port get a secret: the port, and the secret."""
    secret = secrets.token_hex(8)
    with listen("") as server:
        with suppress(RuntimeError):  # too many threads: others do not reach this machine
            threading.Thread(target=_answer, args=(server, secret.encode()), daemon=True).start()
        yield server.getsockname()[1], secret


def _answer(server: socket.socket, secret: bytes) -> None:
    with suppress(OSError):  # the block has ended
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(secret)


def unreached(targets: Sequence[Target]) -> list[str]:
    """Returns the hosts of ``targets`` that this machine does not reach."""
    by_host = {target.host: target for target in targets}
    _, failures = ask_all([*by_host], lambda host: _connect(by_host[host]), durations.DOCTOR_REACH)
    return list(failures)


def _connect(target: Target) -> str:
    """Returns the address that leads to ``target``; an ``OSError`` if none does."""
    seconds = durations.DOCTOR_REACH / max(1, len(target.addresses))
    for address in target.addresses:
        with suppress(OSError), socket.create_connection((address, target.port), timeout=seconds) as connection:
            if connection.recv(64, socket.MSG_WAITALL) == target.secret.encode():
                return address
    raise OSError("not reached")


class Session:
    """A login to a host, where ``main`` answers, until it is closed."""

    def __init__(self, name: str, ssh: Ssh, mpirun: str) -> None:
        self.name = name
        self.facts = MachineFacts()
        self.clock = 0.0
        self._argv = [*login(ssh, durations.DOCTOR_LOGIN), name, _command(mpirun)]
        self._process: Any = None

    def close(self) -> None:
        """Ends the login."""
        if self._process is not None:
            self._process.kill()
            with suppress(OSError, subprocess.TimeoutExpired):
                self._process.wait(timeout=1)

    def learn(self) -> Target:
        """Logs in, and reads the host's clock and facts; returns its listener. An ``OSError`` if it has none."""
        before = time.time()
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace")
        try:
            self.clock = clock_ahead(self._answer(), before, time.time())
            answer = self._answer()
            self.facts = MachineFacts.from_json(answer["facts"])
            return Target(self.name, (self.name, *self.facts.addresses), answer["port"], answer["secret"])
        except (KeyError, TypeError, ValueError) as error:
            raise OSError(f"its choros answers what this one does not understand ({error!r})") from error

    def misses(self, targets: Sequence[Target]) -> list[str]:
        """Returns those of the ``targets`` that the host does not reach."""
        self._process.stdin.write(json.dumps([each for each in targets if each.host != self.name]) + "\n")
        self._process.stdin.flush()
        return [str(name) for name in self._answer()]

    def _answer(self) -> Any:
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise OSError(last_line(self._process.stderr.read()) or "it ended without an answer")


def check_others(job: Job, here: MachineFacts) -> tuple[list[Finding], dict[str, MachineFacts]]:
    """Returns what is found on the remote hosts of ``job``, compared with this machine, and their facts."""
    names = [host.name for host in job.remote]
    try:
        check_client(job.remote, job.ssh)
    except LaunchError as error:
        return [Finding("ssh", PROBLEM, str(error), "apt-get install openssh-client, or --ssh-command", names[0])], {}
    answers, failures = log_in_all(names, job.ssh, durations.DOCTOR_LOGIN)
    findings = [_no_login(name, why, job.ssh) for name, why in failures.items()]
    findings += [Finding("ssh", OK, "It accepts the login.", host=name) for name in answers]
    try:
        check_distinct(answers)
    except (LaunchError, OSError) as error:
        findings.append(Finding("ssh", PROBLEM, str(error), "name each machine once in -H, with all of its slots"))
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(closing(Session(name, job.ssh, here.mpirun_path))) for name in answers}
        port, secret = stack.enter_context(listening())
        targets, failures = ask_all([*sessions], lambda name: sessions[name].learn(), durations.DOCTOR_HOST)
        findings += [_no_choros(name, why) for name, why in failures.items()]
        known = {name: sessions[name] for name in targets}
        for name, session in known.items():
            findings += compare(here, session.facts, name, session.clock)
        findings += _reach(known, [*targets.values(), Target(_HERE, here.addresses, port, secret)])
    return findings, {name: session.facts for name, session in known.items()}


def _reach(sessions: Mapping[str, Session], targets: Sequence[Target]) -> list[Finding]:
    """Returns which hosts, this one too, reach which others."""
    missed, failures = ask_all([*sessions], lambda name: sessions[name].misses(targets), 2 * durations.DOCTOR_REACH)
    missed["localhost"] = unreached([each for each in targets if each.host != _HERE]) if sessions else []
    findings = []
    for name, others in {**missed, **{name: [each.host for each in targets] for name in failures}}.items():
        if others:
            text = f"It does not reach TCP ports of {', '.join(others)}."
            fix = "let the firewalls accept all TCP ports between the hosts, or --network-interfaces with a network"
            findings.append(Finding("reach", PROBLEM, text, fix, name))
        elif sessions:
            findings.append(Finding("reach", OK, "It reaches TCP ports of all other hosts.", host=name))
    return findings


def _command(mpirun: str) -> str:
    """Returns the shell's command for a host: this Python in this directory, as a rank would run."""
    directory = working_directory()
    given = [f"{name}={os.environ[name]}" for name in _INHERITED if os.environ.get(name)]
    mpirun = "" if os.path.dirname(mpirun) == os.path.dirname(sys.executable) else mpirun
    argv = ["env", *given, sys.executable, "-P", "-m", "choros.doctor.hosts", directory, mpirun]
    return f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.join(argv)}"


def _no_login(name: str, why: str, ssh: Ssh) -> Finding:
    fix = f"this must work without a prompt: {shlex.join([*ssh.argv(), name, 'true'])}"
    return Finding("ssh", PROBLEM, f"It cannot be logged in to: {why}.", fix, name)


def _no_choros(name: str, why: str) -> Finding:
    text = f"{sys.executable} cannot run choros there: {why}."
    return Finding("versions", PROBLEM, text, f"install Python and choros at the same path: {sys.executable}", name)


def main() -> None:
    """Answers the doctor; its arguments: the job's directory, and the path of its mpirun, empty for the default."""
    _say(time.time())
    directory, mpirun = sys.argv[1:]
    with listening() as (port, secret):
        _say({"facts": asdict(gather(directory, mpirun or None)), "port": port, "secret": secret})
        targets = json.loads(sys.stdin.readline() or "[]")
        _say(unreached([Target(*each) for each in targets]))
        sys.stdin.read()


def _say(answer: Any) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
