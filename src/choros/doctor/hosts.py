"""The other hosts: whether they accept the login, what they are, and whether all reach each other."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

from choros import durations
from choros.doctor.checks import clock_ahead, compare
from choros.doctor.facts import OK, PROBLEM, Finding, MachineFacts
from choros.doctor.gather import working_directory
from choros.doctor.host import MARK, Target, listening, unreached
from choros.errors import LaunchError
from choros.launch.driver.preflight import ask_all, check_client, check_distinct, last_line, log_in_all, login
from choros.launch.plan.job import Job, Ssh

#: What a host's facts depend on, of the environment that the job's ranks inherit.
_INHERITED = ("PYTHONPATH", "LD_LIBRARY_PATH", "KERAS_BACKEND", "TMPDIR")
_HERE = "this machine"


class Session:
    """A login to a host, where ``doctor/host.py`` answers, until it is closed."""

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
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
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
    argv = ["env", *given, sys.executable, "-P", "-m", "choros.doctor.host", directory, mpirun]
    return f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.join(argv)}"


def _no_login(name: str, why: str, ssh: Ssh) -> Finding:
    fix = f"this must work without a prompt: {shlex.join([*ssh.argv(), name, 'true'])}"
    return Finding("ssh", PROBLEM, f"It cannot be logged in to: {why}.", fix, name)


def _no_choros(name: str, why: str) -> Finding:
    text = f"{sys.executable} cannot run choros there: {why}."
    return Finding("versions", PROBLEM, text, f"install Python and choros at the same path: {sys.executable}", name)
