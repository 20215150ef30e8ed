"""Random schedules of faults in ``fit``: four ranks, of which some die at moments drawn from a seed; see ``faults.py``.

    python tests/elastic/schedules.py --runs 20 --seed 0
    python tests/elastic/schedules.py --mixed --runs 40
    python tests/elastic/schedules.py --sharded --runs 20

Lost ranks are replaced if there is time. Each run must finish with each row trained on exactly once an epoch, in at
most 1.5 times the time of a run without deaths plus three seconds a death, and must leave nothing behind. Prints a line
a run.

With *sharded* optimizer state, on all frameworks, the state counts the rows, too. If a slice is lost with its copy, the
job is started again; such a run may take three times as long.

*Mixed* schedules are of all kinds of faults, on all frameworks: signals to each kind of process, full file systems,
closed descriptors, links that are down. Each run goes on, or ends with the code that is documented; it says why, and
takes 30 s more than one without faults at most. The same command goes on from the last commit of one that was asked to
end.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from launch.launched import CHOROSRUN, Running
from launch.namespaces import ip, several_hosts

RANKS = 4
#: Moments, and how often ranks come to them in a run: the first ones of some of them are at its start.
MOMENTS = {"step": 39, "validation": 3, "primitive": 220, "broadcast": 2, "checkpoint": 3, "commit": 3}
#: Moments of the recovery from another death.
OF_RECOVERY = ("recovery", "shrunk", "change")
#: Of these, each of as many runs in a row has one, besides deaths at any moments.
KINDS = ("at once", "broadcast", "validation", "checkpoint", "commit", *OF_RECOVERY)

KILLED = "was killed by SIGKILL"
LEAVES = "it leaves after this step, and the others go on"
#: By kind of mixed schedule: the fault, of which ``{rank}`` and ``{step}`` are drawn; the exit code; what is said.
MIXED = {
    "a kill": ("{rank}@{step}", 0, KILLED),
    "two kills at once": ("{rank}@{step},{other}@{step}", 0, KILLED),
    "a kill in a commit": ("any@commit:1", 0, KILLED),
    "a kill in the last step": ("{rank}@38", 0, KILLED),
    "SIGTERM to a rank": ("{rank}@{step}=SIGTERM", 0, LEAVES),
    "SIGTERM to a wrapper": ("{rank}@{step}=SIGTERM!wrapper", 0, LEAVES),
    "SIGTERM to mpirun": ("{rank}@{step}=SIGTERM!mpirun", 0, "mpirun was ended by a signal; it is started again"),
    "SIGTERM to chorosrun": ("{rank}@{step}=SIGTERM!", 75, "preempted: the ranks have ended"),
    "SIGSTOP to a rank": ("{rank}@{step}=SIGSTOP", 0, "rank {rank} was killed"),
    "SIGSTOP to a wrapper": ("{rank}@{step}=SIGSTOP!wrapper", 0, "rank {rank} was killed"),
    "SIGSTOP to mpirun": ("{rank}@{step}=SIGSTOP!mpirun", 70, "is stopped by a signal: kill -CONT"),
    "SIGSTOP to chorosrun": ("{rank}@{step}=OUTSIDE", 0, ""),
    "a full TMPDIR": ("{rank}@{step}=FULL:{tmp},{rank}@{step}", 0, "no new rank is started: {tmp}"),
    "a full /dev/shm": ("{rank}@{step}=FULL:/dev/shm,{rank}@{step}", 0, KILLED),
    "closed descriptors": ("{rank}@{step}", 0, KILLED),
    "a link down for 1 s": ("{rank}@{step}=OUTSIDE", 0, ""),
    "a link down for 2 s": ("{rank}@{step}=OUTSIDE", 0, ""),
    "a link down for 5 s": ("{rank}@{step}=OUTSIDE", 0, "have lost each other; it is started again"),
    "a kill of rank 0 while a new rank joins": ("1@5", 0, "rank 0 of 3 was lost"),
    "a kill of a new rank while it joins": ("1@5", 0, KILLED),
}
FRAMEWORKS = ("torch", "tensorflow", "jax")
#: How much longer than one without faults a run with a fault of any kind may take.
BOUND = 30.0


@dataclass(frozen=True)
class Schedule:
    """What happens in one run.

    Attributes:
        least: ``--min-np``.
        deaths: as ``faults.py`` reads them.
        api: the argument of ``fit_script.py``.
    """

    least: int
    deaths: tuple[str, ...]
    api: str = "strategy"

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """Equal seeds have equal schedules."""
        source = random.Random(seed)
        least, kind = source.choice([1, 2]), KINDS[seed % len(KINDS)]
        ranks = source.sample(range(RANKS), source.randint(2, RANKS - least))
        deaths = [f"{rank}@{_moment(source)}" for rank in ranks]
        if kind == "at once":
            deaths[1] = f"{ranks[1]}@{deaths[0].partition('@')[2]}"
        elif kind in OF_RECOVERY:
            deaths[1] = f"{ranks[1]}@{kind}:0"
        elif kind in ("checkpoint", "commit"):
            deaths[0] = f"any@{kind}:{source.randrange(MOMENTS[kind])}"
        else:
            deaths[0] = f"{ranks[0]}@{kind}:{source.randrange(MOMENTS[kind])}"
        api = "strategy" if kind == "commit" else source.choice(["strategy", "horovod"])
        return cls(least, tuple(deaths), api)

    def __str__(self) -> str:
        return f"{self.api}, --min-np {self.least}: {','.join(self.deaths) or 'no deaths'}"


def _moment(source: random.Random) -> str:
    moment = source.choice(["step", "primitive", "validation"])
    count = source.randrange(MOMENTS[moment])
    return str(count) if moment == "step" else f"{moment}:{count}"


def run(schedule: Schedule, *flags: str, framework: str = "torch", sharded: bool = False) -> tuple[float, list[str]]:
    """Runs a schedule; returns its seconds, and what is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        directory, own = Path(temporary), Path(temporary) / "tmp"
        own.mkdir()
        command = [sys.executable, Path(__file__).with_name("fit_script.py"), schedule.api, ",".join(schedule.deaths)]
        limits = ("-np", RANKS, "--min-np", schedule.least, "--commit-dir", directory / "commits", *flags)
        environ = {"KERAS_BACKEND": framework, "TMPDIR": str(own)}
        environ |= {"CHOROS_SHARD_STATE": "1", "FIT_MOMENTUM": "1"} if sharded else {}
        with Running(*limits, *command, directory, env=environ, warm=True) as job:
            ended = job.end()
            job.assert_nothing_left()
        reports = ended.reports
        if not reports:
            return ended.seconds, [f"exit code {ended.code}", ended.err]
        problems = [f"exit code {ended.code}"] if ended.code else []
        left = [path.name for path in own.iterdir() if not path.name.startswith("torchinductor")]  # PyTorch's cache
        left += [path.name for path in Path("/dev/shm").iterdir() if reports[0]["job"] in path.name]
        problems += [f"left behind: {name}" for name in left]
        problems += [f"rank {report['rank']}: rows {report['wrong']}" for report in reports if report["wrong"]]
        problems += [f"rank {report['rank']}: {report['epochs']} epochs" for report in reports if report["epochs"] != 3]
        if not schedule.least <= len(reports) <= RANKS or {report["size"] for report in reports} != {len(reports)}:
            problems.append(f"{len(reports)} ranks reported: {reports}")
        if schedule.deaths and "was killed by SIGKILL" not in ended.err:
            problems.append("no rank died")
        return ended.seconds, [*problems, ended.err] if problems else []


@dataclass(frozen=True)
class MixedSchedule:
    """What happens in one run, of any kind.

    Attributes:
        kind: see ``MIXED``.
        framework: that of Keras.
        api: the argument of ``fit_script.py``.
        rank: the rank that is struck, or whose process is.
        other: another one.
        step: the step.
    """

    kind: str
    framework: str
    api: str
    rank: int
    other: int
    step: int

    @classmethod
    def drawn(cls, seed: int) -> MixedSchedule:
        """Equal seeds have equal schedules; as many as there are kinds, in a row, have each of them once."""
        source, kind = random.Random(seed), list(MIXED)[seed % len(MIXED)]
        rank, other = source.sample(range(RANKS), 2)
        api = "strategy" if "commit" in kind else source.choice(["strategy", "horovod"])
        framework = FRAMEWORKS[(seed + 2 * (seed // len(MIXED))) % len(FRAMEWORKS)]
        return cls(kind, framework, api, rank, other, source.randrange(3, 36))

    @property
    def code(self) -> int:
        """The exit code that is documented."""
        return MIXED[self.kind][1]

    def faults(self, tmp: Path) -> str:
        """Returns what ``faults.py`` reads; ``tmp``: the directory for temporary files."""
        return self._filled(MIXED[self.kind][0], tmp)

    def says(self, tmp: Path) -> str:
        """Returns a part of what is said of the fault."""
        return self._filled(MIXED[self.kind][2], tmp)

    def _filled(self, text: str, tmp: Path) -> str:
        return text.format(rank=self.rank, other=self.other, step=self.step, tmp=tmp)

    def __str__(self) -> str:
        return f"{self.kind}, {self.framework}, {self.api}, rank {self.rank} at step {self.step}"


def run_mixed(schedule: MixedSchedule) -> tuple[float, list[str]]:
    """Runs a schedule, and, if it ends early as documented, the same command again; returns the seconds of the first
    run, and what is wrong.
    """
    with ExitStack() as context:
        directory = Path(context.enter_context(tempfile.TemporaryDirectory()))
        own = directory / "tmp"
        own.mkdir()
        flags: list[object] = ["--commit-dir", directory / "commits"]
        flags += ["--stall-shutdown", 4] if "=SIGSTOP" in schedule.faults(own) else []
        start, struck = CHOROSRUN, None
        if schedule.kind.startswith("a full"):
            size, place = ("24m", own) if "TMPDIR" in schedule.kind else ("96m", "/dev/shm")
            mount = f'mount -t tmpfs -o size={size} tmpfs {place} && exec "$@"'
            start = ("unshare", "--mount", "sh", "-c", mount, "sh", *CHOROSRUN)
        if "link" in schedule.kind:
            network = context.enter_context(several_hosts(directory))
            flags += ["--ssh-command", network.reach, "-H", ",".join(f"{host}:2" for host in network.hosts)]
            seconds = float(re.findall(r"\d", schedule.kind)[0])

            def struck(job: Running) -> None:
                ip("-n", network.namespaces[1], "link", "set", "eth0", "down")
                (directory / "done").touch()
                time.sleep(seconds)
                ip("-n", network.namespaces[1], "link", "set", "eth0", "up")

        if schedule.kind == "SIGSTOP to chorosrun":

            def struck(job: Running) -> None:
                job.signal(signal.SIGSTOP)
                (directory / "done").touch()
                time.sleep(2)
                job.signal(signal.SIGCONT)

        script = [
            sys.executable,
            Path(__file__).with_name("fit_script.py"),
            schedule.api,
            schedule.faults(own),
            directory,
        ]
        if "joins" in schedule.kind:
            who = "joined" if "rank 0" in schedule.kind else f"joins:{directory / 'died'}"
            script[1:] = [Path(__file__).with_name("replaced_script.py"), schedule.api, schedule.faults(own), who]
        env = {"KERAS_BACKEND": schedule.framework, "TMPDIR": str(own), "CHOROS_STALL_SECONDS": "2"}
        env |= {"FIT_CLOSED": "1"} if schedule.kind == "closed descriptors" else {}
        command = ("-np", RANKS, "--min-np", 1, *flags, *script)
        seconds_taken, problems = _one_run(command, env, start, directory, struck, schedule)
        if "joins:" in str(script[-1]) and not (directory / "died").exists():
            problems.append("no new rank was killed")
        if not problems and schedule.code == 75:  # the same command goes on
            script[3] = ""
            again = ("-np", RANKS, "--min-np", 1, *flags, *script)
            _, problems = _one_run(again, env, CHOROSRUN, directory, None, schedule, code=0)
        return seconds_taken, problems


def _one_run(
    command: tuple[object, ...],
    env: dict[str, str],
    start: tuple[str, ...],
    directory: Path,
    struck: Callable[[Running], None] | None,
    schedule: MixedSchedule,
    code: int | None = None,
) -> tuple[float, list[str]]:
    code = schedule.code if code is None else code
    own_namespace = start is not CHOROSRUN or "link" in schedule.kind  # which no process has that runs already
    with Running(*command, env=env, start=start, warm=not own_namespace) as job:

        def strike() -> None:
            while not (directory / "come").exists():
                if job.process.poll() is not None:
                    return
                time.sleep(0.01)
            struck(job)

        thread = threading.Thread(target=strike if struck else lambda: None)
        thread.start()
        ended = job.end()
        thread.join()
        job.assert_nothing_left()
    reports = ended.reports
    problems = [] if ended.code == code else [f"exit code {ended.code}"]
    problems += [f"rank {report['rank']}: rows {report['wrong']}" for report in reports if report["wrong"]]
    if not reports and code != 75:
        problems.append("no rank has finished")
    if code == schedule.code and schedule.says(directory / "tmp") not in ended.err:
        problems.append(f"it does not say: {schedule.says(directory / 'tmp')}")
    sizes = {report["size"] for report in reports}
    if len(sizes) > 1:
        problems.append(f"sizes {sizes}")
    left = [path.name for path in (directory / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    left += [path.name for path in Path("/dev/shm").iterdir() if reports and reports[0]["job"] in path.name]
    problems += [f"left behind: {name}" for name in left]
    return ended.seconds, [*problems, ended.err[-6000:]] if problems else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sharded", action="store_true", help="with shard_state, on all frameworks")
    parser.add_argument("--mixed", action="store_true", help="faults of all kinds, on all frameworks")
    parser.add_argument("flags", nargs="*", help="further flags of chorosrun, after --")
    arguments = parser.parse_args()
    seeds, failed = range(arguments.seed, arguments.seed + arguments.runs), 0
    if arguments.mixed or arguments.sharded:
        undisturbed = {name: run(Schedule(1, ()), framework=name, sharded=arguments.sharded)[0] for name in FRAMEWORKS}
    else:
        undisturbed = {
            api: statistics.median(run(Schedule(1, (), api), *arguments.flags)[0] for _ in range(3))
            for api in ("strategy", "horovod")
        }
    print("undisturbed:", ", ".join(f"{what} {seconds:.1f} s" for what, seconds in undisturbed.items()), flush=True)
    for seed in seeds:
        if arguments.mixed:
            schedule = MixedSchedule.drawn(seed)
            seconds, problems = run_mixed(schedule)
            limit = BOUND + undisturbed[schedule.framework]
        elif arguments.sharded:
            schedule, framework = Schedule.drawn(seed), FRAMEWORKS[seed % len(FRAMEWORKS)]
            seconds, problems = run(schedule, *arguments.flags, framework=framework, sharded=True)
            limit = 3.0 * undisturbed[framework] + 3.0 * len(schedule.deaths)
        else:
            schedule = Schedule.drawn(seed)
            seconds, problems = run(schedule, *arguments.flags)
            limit = 1.5 * undisturbed[schedule.api] + 3.0 * len(schedule.deaths)
        problems += [f"it took longer than {limit:.1f} s"] if seconds > limit else []
        failed += bool(problems)
        verdict = "\n  ".join(problems) or "ok"
        print(f"seed {seed}: {schedule}: {seconds:.1f} s of {limit:.1f} s: {verdict}", flush=True)
    print(f"{arguments.runs - failed} of {arguments.runs} runs finished as they must")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
