"""Random schedules of deaths in ``fit``: four ranks, of which some die at moments drawn from a seed; see ``faults.py``.

    python tests/elastic/schedules.py --runs 20 --seed 0

Lost ranks are replaced if there is time. Each run must finish with each row trained on exactly once an epoch, in at
most 1.5 times the time of a run without deaths plus three seconds a death, and must leave nothing behind. Prints a line
a run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from launch.launched import Running

RANKS = 4
#: Moments, and how often ranks come to them in a run: the first ones of some of them are at its start.
MOMENTS = {"step": 39, "validation": 3, "primitive": 220, "broadcast": 2, "checkpoint": 3, "commit": 3}
#: Moments of the recovery from another death.
OF_RECOVERY = ("recovery", "shrunk", "change")
#: Of these, each of as many runs in a row has one, besides deaths at any moments.
KINDS = ("at once", "broadcast", "validation", "checkpoint", "commit", *OF_RECOVERY)


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


def run(schedule: Schedule, *flags: str, framework: str = "torch") -> tuple[float, list[str]]:
    """Runs a schedule; returns its seconds, and what is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        directory, own = Path(temporary), Path(temporary) / "tmp"
        own.mkdir()
        command = [sys.executable, Path(__file__).with_name("fit_script.py"), schedule.api, ",".join(schedule.deaths)]
        limits = ("-np", RANKS, "--min-np", schedule.least, "--commit-dir", directory / "commits", *flags)
        with Running(*limits, *command, directory, env={"KERAS_BACKEND": framework, "TMPDIR": str(own)}) as job:
            ended = job.end()
            job.assert_nothing_left()
        reports = [json.loads(report) for report in re.findall(r"{.*}", ended.out)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="further flags of chorosrun, after --")
    arguments = parser.parse_args()
    undisturbed = {
        api: statistics.median(run(Schedule(1, (), api), *arguments.flags)[0] for _ in range(3))
        for api in ("strategy", "horovod")
    }
    print("undisturbed:", ", ".join(f"{api} {seconds:.1f} s" for api, seconds in undisturbed.items()), flush=True)
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
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
