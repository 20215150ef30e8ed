"""Starts an elastic job again when it has lost mpirun, a host or a link: acts as ``plan/restart.py`` says."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from choros.config import COMMIT_DIR
from choros.errors import PREEMPTED, ConfigError
from choros.launch.driver.discovery import run_script
from choros.launch.driver.host_names import own_names
from choros.launch.driver.host_watch import HostWatch
from choros.launch.driver.losses import loss_of
from choros.launch.driver.stopping import Reason
from choros.launch.driver.supervisor import JobEnd
from choros.launch.plan.discovery import HostHealth, parse_discovered
from choros.launch.plan.elastic import Elastic
from choros.launch.plan.environment import in_slurm
from choros.launch.plan.hosts import Host, total_slots
from choros.launch.plan.job import Job
from choros.launch.plan.limits import Limits
from choros.launch.plan.restart import End, JobLoss, Restart, Tries, WaitForHosts, cut_off, moved, next_step, restarted

__all__ = ["launch_again"]

#: How long a host may take to accept the login.
_LOGIN_SECONDS = 10.0
_POLL_SECONDS = 1.0
_CAUGHT = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

#: Runs a job to its end, within a number of seconds.
Launch = Callable[[Job, Limits, HostWatch | None], JobEnd]


def launch_again(
    job: Job, environ: Mapping[str, str], limits: Limits, launch: Launch, show: Callable[[str], None]
) -> JobEnd:
    """Runs ``job``, and if it loses mpirun, hosts or links, again on what is left; returns its last end.

    Args:
        job: the job.
        environ: the user's environment.
        limits: the time limits, of all launches together.
        launch: runs a job once.
        show: shows a message.
    """
    end_of_time = None if limits.run is None else time.monotonic() + limits.run
    elastic = job.elastic
    if elastic is None:
        return launch(job, limits, None)
    waiting = _Waiting(job, elastic, environ, HostHealth(job.discovery.cooldown), end_of_time, show)
    tries, current = Tries(), job
    while True:
        left = None if end_of_time is None else max(0.0, end_of_time - time.monotonic())
        with _watched(waiting, current, tries) as hosts:
            job_end = launch(current, replace(limits, run=left), hosts)
        if job_end.move is not None and _has_moved(job_end):
            tries = Tries(tries.restarts + 1)
            current = restarted(job, job_end.move, tries.restarts, own_names(), environ)
            show(f"chorosrun: the job {_again(current, job_end.move, tries.restarts, environ)}.")
            continue
        loss = loss_of(job_end, current)
        if loss is None:
            return job_end
        tries = tries.after(loss)
        try:
            with _raised():
                step = waiting.after(loss, tries)
        except _Signalled as signalled:
            return _ended_by(signalled.number, job_end)
        if step is None:
            return replace(job_end, reason=Reason.TIMEOUT, waits=())
        if isinstance(step, End):
            return replace(job_end, given_up=f"{loss.what}; the job ends: {step.why}")
        tries = replace(tries, restarts=tries.restarts + 1)
        current = restarted(job, step, tries.restarts, own_names() if step.hosts else (), environ)
        show(f"chorosrun: {loss.what}; it {_again(current, step, tries.restarts, environ)}.")


@contextmanager
def _watched(waiting: _Waiting, job: Job, tries: Tries) -> Iterator[HostWatch | None]:
    """A block in which the hosts that the script prints are watched, if the job can go on on others."""
    elastic, resets = waiting.elastic, waiting.elastic.resets
    has_commits = bool(COMMIT_DIR.read({**waiting.environ, **job.environment}))
    if job.discovery.script is None or not has_commits or (resets is not None and tries.restarts >= resets):
        yield None
        return
    reached = {host.name for host in job.hosts}

    def there() -> tuple[Host, ...]:
        """The hosts of now; new ones when they accept the login."""
        nonlocal reached
        try:
            hosts = waiting.known()
        except ConfigError:
            return watch.found
        new = tuple(host for host in hosts if host.name not in reached)
        reached = (reached & {host.name for host in hosts}) | {host.name for host in waiting.answering(new)}
        return tuple(host for host in hosts if host.name in reached)

    watch = HostWatch(there, lambda hosts: moved(job, elastic, hosts))
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def _has_moved(job_end: JobEnd) -> bool:
    """Whether all ranks that were left have committed and ended, and only because hosts have changed."""
    codes = {end.code for end in job_end.exits.values()}
    return not job_end.preempted and job_end.reason is None and PREEMPTED in codes and not job_end.missing


@dataclass
class _Waiting:
    """Looks for hosts on which the job can go on.

    Attributes:
        health: which hosts are left out.
    """

    job: Job
    elastic: Elastic
    environ: Mapping[str, str]
    health: HostHealth
    end_of_time: float | None
    show: Callable[[str], None]

    def after(self, loss: JobLoss, tries: Tries) -> Restart | End | None:
        """Returns what to do after ``loss``, when there are hosts or it has waited long enough.

        ``None``: the time of the job is over.
        """
        began = time.monotonic()
        for host in loss.hosts:
            self.health = self.health.failed(host, began)
        said = ""
        while True:
            step = next_step(self.job, self.elastic, tries, self._hosts(loss, tries), time.monotonic() - began)
            if not isinstance(step, WaitForHosts):
                return step
            if self.end_of_time is not None and time.monotonic() >= self.end_of_time:
                return None
            message = f"chorosrun: {loss.what}; {self._waits(step)}."
            if message != said:
                self.show(message)
                said = message
            time.sleep(_POLL_SECONDS)

    def _waits(self, step: WaitForHosts) -> str:
        slots = f"{step.slots} slot{'s' * (step.slots != 1)}"
        return (
            f"waiting up to {self.elastic.timeout:g} s for hosts with slots for --min-np {self.elastic.least} ranks, "
            f"now {slots}"
        )

    def _hosts(self, loss: JobLoss, tries: Tries) -> tuple[Host, ...]:
        """The hosts on which the job can be started again."""
        try:
            known = self.known()
        except ConfigError as error:
            self.show(f"chorosrun: {error}")
            return ()
        there = self.answering(known)
        if in_slurm(self.environ):
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
        discovery, hosts = self.job.discovery, self.job.hosts
        if discovery.script is not None:
            hosts = parse_discovered(run_script(discovery.script), discovery.slots)
        return self.health.usable(hosts, time.monotonic())

    def answering(self, hosts: tuple[Host, ...]) -> tuple[Host, ...]:
        """Those that accept the login."""
        names = own_names() if hosts else frozenset()
        remote = [host for host in hosts if host.name not in names]
        if not remote or in_slurm(self.environ):  # there mpirun does without ssh
            return hosts
        from choros.launch.driver.preflight import answering  # takes 20 ms; other jobs do not need it

        there = answering(remote, self.job.ssh, _LOGIN_SECONDS)
        return tuple(host for host in hosts if host not in remote or host in there)


def _again(job: Job, step: Restart, number: int, environ: Mapping[str, str]) -> str:
    """What happens now, in words."""
    where = f" on {','.join(map(str, step.hosts))}" if step.hosts else ""
    commits = COMMIT_DIR.read({**environ, **job.environment})
    begins = "goes on from its last commit" if commits else "begins anew, as it has no --commit-dir"
    kind = job.roles.kind(step.size)
    return f"is started again, with {step.size} {kind}{where}, and {begins} (restart {number})"


class _Signalled(Exception):
    """A signal has arrived."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def _raised() -> Iterator[None]:
    """A block in which signals raise ``_Signalled``; only in the main thread."""

    def handler(number: int, frame: FrameType | None) -> None:
        del frame
        raise _Signalled(number)

    is_main = threading.current_thread() is threading.main_thread()
    catchable = _CAUGHT if is_main else ()
    caught = [number for number in catchable if signal.getsignal(number) != signal.SIG_IGN]  # nohup
    previous = {number: signal.signal(number, handler) for number in caught}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def _ended_by(number: int, job_end: JobEnd) -> JobEnd:
    """The end of a job by a signal while it waits for hosts: the last commit is all that there is of it."""
    preempted = number in (signal.SIGTERM, signal.SIGUSR1)
    return JobEnd(0, reason=Reason.TERMINATE, elastic=job_end.elastic, preempted=preempted)
