"""Starts an elastic job again when it has lost mpirun, a host or a link: acts as ``plan/restart.py`` says.
While it runs, it watches what the host discovery script prints.

::

    thread     script ── a:2,b:2 ── a:2,b:2 ── a:2,b:2,c:2 ── does c accept a login? ── yes
                                                                                        │ a byte, in a pipe
    supervisor ── waits in its loop for ranks and mpirun ───────────────────────────────▼ wanted(): a:2,b:2,c:2
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from types import FrameType

from choros import durations
from choros.errors import PREEMPTED, ConfigError
from choros.launch.driver.job_end import JobEnd, Reason
from choros.launch.driver.machine import own_names, run_script
from choros.launch.driver.outcome import loss_of
from choros.launch.plan.environment import in_slurm
from choros.launch.plan.hosts import Host, parse_discovered, total_slots
from choros.launch.plan.job import Elastic, Job, Limits
from choros.launch.plan.restart import HostHealth, JobLoss, Step, Tries, cut_off, moved, next_step, restarted
from choros.settings import VARIABLES
from choros.transport.loop import caught_signals
from choros.wording import count_text

#: SIGINT is a KeyboardInterrupt.
_CAUGHT = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class HostWatch:
    """Polls the hosts on which ``job`` could go on in a thread of its own, which may take its time."""

    def __init__(self, waiting: _Waiting, job: Job) -> None:
        self._waiting, self._job = waiting, job
        self._reader, self._writer = os.pipe()
        self._reached = {host.name for host in job.hosts}
        self._found: tuple[Host, ...] = ()
        self._ends = threading.Event()
        threading.Thread(target=self._poll, name="choros: hosts", daemon=True).start()

    def fileno(self) -> int:
        """Readable when the hosts have changed."""
        return self._reader

    def wanted(self) -> Step | None:
        """Returns how the job is to be started on the hosts of now; ``None``: it stays as it is."""
        os.read(self._reader, 1 << 10)
        return moved(self._job, self._waiting.elastic, self._found)

    def close(self) -> None:
        """Ends the thread after its present call."""
        self._ends.set()
        os.close(self._reader)

    def _poll(self) -> None:
        while not self._ends.wait(durations.HOSTS_LOOK):
            found = self._there()
            if found != self._found:
                self._found = found
                with suppress(BrokenPipeError):  # it has been closed
                    os.write(self._writer, b".")
        os.close(self._writer)

    def _there(self) -> tuple[Host, ...]:
        """The hosts of now; new ones when they accept the login."""
        try:
            hosts = self._waiting.known()
        except ConfigError:
            return self._found
        names = {host.name for host in hosts}
        new = self._waiting.answering(tuple(host for host in hosts if host.name not in self._reached))
        self._reached = (self._reached & names) | {host.name for host in new}
        return tuple(host for host in hosts if host.name in self._reached)


#: Runs a job to its end, within a number of seconds.
Launch = Callable[[Job, Limits, HostWatch | None], JobEnd]


def launch_again(
    job: Job,
    elastic: Elastic,
    limits: Limits,
    launch: Launch,
    show: Callable[[str], None],
) -> JobEnd:
    """Runs ``job``, and if it loses mpirun, hosts or links, again on what is left; limits hold for all launches."""
    try:
        with caught_signals(_CAUGHT, _raise):  # but while a launch catches them itself
            return _launch_again(job, elastic, limits, launch, show)
    except _AskedToEnd as asked:
        return _asked_to_end(asked.args[0], elastic)


class _AskedToEnd(BaseException):
    """A signal has come between two launches."""


def _raise(number: int, _frame: FrameType | None) -> None:
    raise _AskedToEnd(number)


def _asked_to_end(number: int, elastic: Elastic) -> JobEnd:
    """The end, by a signal to chorosrun, of a job of which the last commit is all that there is."""
    reason = Reason.INTERRUPT if number == signal.SIGINT else Reason.TERMINATE
    return JobEnd(0, reason=reason, elastic=elastic, preempted=number in (signal.SIGTERM, signal.SIGUSR1))


def _launch_again(job: Job, elastic: Elastic, limits: Limits, launch: Launch, show: Callable[[str], None]) -> JobEnd:
    end_of_time = None if limits.run is None else time.monotonic() + limits.run
    waiting = _Waiting(job, elastic, HostHealth(elastic.cooldown), end_of_time, show)
    tries, current = Tries(), job
    while True:
        left = None if end_of_time is None else max(0.0, end_of_time - time.monotonic())
        with waiting.watch(current, tries) as hosts:
            job_end = launch(current, replace(limits, run=left), hosts)
        codes = {end.code for end in job_end.exits.values()}
        # All ranks that were left have committed and ended, and only because hosts have changed.
        has_moved = not job_end.asked and job_end.reason is None and PREEMPTED in codes and not job_end.missing
        if job_end.moves and has_moved:
            move = job_end.move or current.hosts  # meanwhile they are again as they were
            tries = Tries(tries.restarts + 1)
            current = restarted(job, move, tries.restarts, own_names(), os.environ)
            show(f"chorosrun: the job {_again(current, move, tries.restarts)}.")
            continue
        loss = loss_of(job_end, current)
        if loss is None:
            return job_end
        if job_end.asked:
            return _asked_to_end(job_end.asked, elastic)
        tries = tries.after(loss)
        step = waiting.after(loss, tries)
        if step is None:
            return replace(job_end, reason=Reason.TIMEOUT, waits=())
        if isinstance(step, str):
            return replace(job_end, given_up=f"{loss.what}; the job ends: {step}")
        tries = replace(tries, restarts=tries.restarts + 1)
        current = restarted(job, step, tries.restarts, own_names() if step else (), os.environ)
        show(f"chorosrun: {loss.what}; it {_again(current, step, tries.restarts)}.")


@dataclass
class _Waiting:
    """Looks for hosts on which the job can go on; ``health`` says which are left out."""

    job: Job
    elastic: Elastic
    health: HostHealth
    end_of_time: float | None
    show: Callable[[str], None]

    def watch(self, job: Job, tries: Tries) -> AbstractContextManager[HostWatch | None]:
        """A block in which the hosts that the script prints are watched, if the job can go on on others."""
        has_commits = VARIABLES["commit_dir"].read({**os.environ, **job.environment})
        is_last = self.elastic.resets is not None and tries.restarts >= self.elastic.resets
        if self.elastic.script is None or not has_commits or is_last:
            return nullcontext()
        return closing(HostWatch(self, job))

    def after(self, loss: JobLoss, tries: Tries) -> Step | str | None:
        """Returns how to go on after ``loss``, or why not; ``None``: no time is left."""
        began = time.monotonic()
        for host in loss.hosts:
            self.health = self.health.failed(host, began)
        said = ""
        while True:
            hosts = self._hosts(loss, tries)
            step = next_step(self.job, self.elastic, tries, hosts, time.monotonic() - began)
            if step is not None:
                return step
            if self.end_of_time is not None and time.monotonic() >= self.end_of_time:
                return None
            count = total_slots(hosts)
            slots = count_text(count, "slot")
            message = (
                f"chorosrun: {loss.what}; waiting up to {self.elastic.timeout:g} s for hosts with slots for --min-np "
                f"{self.elastic.least} ranks, now {slots}."
            )
            if message != said:
                self.show(message)
                said = message
            time.sleep(durations.HOSTS_RETRY)

    def _hosts(self, loss: JobLoss, tries: Tries) -> tuple[Host, ...]:
        try:
            known = self.known()
        except ConfigError as error:
            self.show(f"chorosrun: {error}")
            return ()
        there = self.answering(known)
        if in_slurm(os.environ):
            there = tuple(host for host in there if host.name not in loss.hosts)
        out = cut_off(there, tries.cut)
        connected = tuple(host for host in there if host.name not in out)
        if total_slots(connected) < self.elastic.least:
            return there
        for host in out:
            self.health = self.health.failed(host, time.monotonic())
        return connected

    def known(self) -> tuple[Host, ...]:
        """The hosts that the script prints, or that were given, and are not left out; a ``ConfigError`` if it fails."""
        hosts, script = self.job.hosts, self.elastic.script
        if script is not None:
            hosts = parse_discovered(run_script(script), self.elastic.slots)
        return self.health.usable(hosts, time.monotonic())

    def answering(self, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        """Those that accept the login."""
        names = own_names() if hosts else frozenset()
        remote = [host for host in hosts if host.name not in names]
        if not remote or in_slurm(os.environ):  # there mpirun does without ssh
            return hosts
        from choros.launch.driver.preflight import log_in_all  # takes 20 ms; other jobs do not need it

        there, _ = log_in_all([host.name for host in remote], self.job.ssh, durations.LOGIN)
        return tuple(host for host in hosts if host not in remote or host.name in there)


def _again(job: Job, step: Step, number: int) -> str:
    where = f" on {','.join(map(str, step))}" if step else ""
    commits = VARIABLES["commit_dir"].read({**os.environ, **job.environment})
    begins = "goes on from its last commit" if commits else "begins anew, as it has no --commit-dir"
    kind = job.roles.kind(job.size)
    return f"is started again, with {job.size} {kind}{where}, and {begins} (restart {number})"
