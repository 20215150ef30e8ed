"""What a signal to each process of a job does: the table of docs/elastic.md, which ``test_signal_table.py`` tries.

Run as a script, it writes the table.
"""

from dataclasses import dataclass
from pathlib import Path

from launch.flag_pages import filled

PAGE = Path(__file__).parents[2] / "docs" / "elastic.md"
SIGNALS = ("TERM", "INT", "HUP", "KILL", "STOP")


@dataclass(frozen=True)
class Effect:
    """What a signal does.

    Attributes:
        text: in words.
        code: chorosrun's exit code.
        finish: how many of three ranks finish the training.
        says: a part of what chorosrun and the ranks write on standard error.
    """

    text: str
    code: int
    finish: int = 0
    says: str = ""


def ends(name: str, number: int) -> Effect:
    return Effect("the job ends", 128 + number, says=f"was killed by SIG{name} (signal {number})")


def goes_on(name: str, number: int) -> Effect:
    return Effect("the others go on without it", 0, 2, f"was killed by SIG{name} (signal {number})")


NOTHING = Effect("nothing", 0, 3)
LEAVES = Effect("it [leaves after its step](#preemption), and the others go on", 0, 2, "it leaves after this step")
REPORT = "[a report](hangs.md); after `--stall-shutdown` "
HANGS = Effect(f"{REPORT}the job ends", 70, says="is stopped by a signal: kill -CONT")
KILLED = Effect(f"{REPORT}it is killed, and the others go on", 0, 2, "rank 1 was killed; 2 ranks go on")
#: When the ranks have finished, they wait for what is stopped.
HANGS_LATER = Effect(f"at the end of the training {REPORT}the job ends", 70, 3, HANGS.says)
KILLED_LATER = Effect(f"at the end of the training {REPORT}it is killed, and the others end", 0, 2, KILLED.says)
MPIRUN = Effect("the job ends", 70, says="mpirun was")
AGAIN = Effect("the job [is started again](#starting-again), from its last commit", 0, 3, "mpirun was")
INTERRUPTED = Effect("all ranks get SIGINT, and have `--grace-period` to end", 130, says="chorosrun: interrupted.")
TERMINATED = Effect("all ranks get SIGTERM, and have `--grace-period` to end", 143, says="chorosrun: terminated.")
COMMITS = Effect("all ranks [commit after their step](#preemption), and end", 75, says="the ranks have ended")
LOST = Effect("the others go on without it", 0, 2, "rank 1 of 3 was lost, 2 go on")
ORPHANED = Effect("all other processes are killed", -9)
PAUSED = Effect("the ranks go on; output, and the end of the job, wait for SIGCONT", 0, 3)

#: The process and the signal; what it does in a plain job, and in an elastic one, whose ranks train with ``fit``.
EFFECTS = {
    ("rank", "TERM"): (ends("TERM", 15), LEAVES),
    ("rank", "INT"): (ends("INT", 2), goes_on("INT", 2)),
    ("rank", "HUP"): (ends("HUP", 1), goes_on("HUP", 1)),
    ("rank", "KILL"): (ends("KILL", 9), goes_on("KILL", 9)),
    ("rank", "STOP"): (HANGS, KILLED),
    ("wrapper", "TERM"): (ends("TERM", 15), LEAVES),
    ("wrapper", "INT"): (NOTHING, NOTHING),
    ("wrapper", "HUP"): (NOTHING, NOTHING),
    ("wrapper", "KILL"): (Effect("the job ends", 70, says="rank 1"), LOST),
    ("wrapper", "STOP"): (HANGS_LATER, KILLED_LATER),
    ("mpirun", "TERM"): (MPIRUN, AGAIN),
    ("mpirun", "INT"): (MPIRUN, AGAIN),
    ("mpirun", "HUP"): (MPIRUN, AGAIN),
    ("mpirun", "KILL"): (MPIRUN, AGAIN),
    ("mpirun", "STOP"): (HANGS_LATER, HANGS_LATER),
    ("chorosrun", "TERM"): (TERMINATED, COMMITS),
    ("chorosrun", "INT"): (INTERRUPTED, INTERRUPTED),
    ("chorosrun", "HUP"): (TERMINATED, COMMITS),
    ("chorosrun", "KILL"): (ORPHANED, ORPHANED),
    ("chorosrun", "STOP"): (PAUSED, PAUSED),
}


def page() -> str:
    """Returns docs/elastic.md, with its table as it should be."""
    rows = ["| to | signal | in a plain job | code | in an elastic job, in `fit` | code |", "|---|---|---|---|---|---|"]
    merged: dict[tuple[str, tuple[Effect, Effect]], list[str]] = {}
    for (process, name), effects in EFFECTS.items():
        merged.setdefault((process, tuple((each.text, _code(each)) for each in effects)), []).append(f"SIG{name}")
    for (process, ((plain, code), (elastic, elastic_code))), names in merged.items():
        rows.append(f"| {process} | {', '.join(names)} | {plain} | {code} | {elastic} | {elastic_code} |")
    return filled(PAGE, {"signals": rows})


def _code(effect: Effect) -> int:
    """As a shell shows it."""
    return effect.code if effect.code >= 0 else 128 - effect.code


if __name__ == "__main__":
    PAGE.write_text(page())
