"""The texts about ranks that others wait for: who they are, what they do, and their stacks. Pure."""

import textwrap
import time
from collections.abc import Sequence

from choros.launch.protocol.frames import Stacks, Start
from choros.observe.stacks import STOPPED
from choros.observe.stragglers import RankProgress
from choros.observe.waits import Stall

#: A report names all ranks that are missing, and shows the stacks of the first ones.
_MOST_STACKS = 8


def rank_report(
    name: str,
    start: Start | None,
    stacks: Stacks | None,
    *,
    runs: bool = True,
    doing: str = "",
    progress: RankProgress | None = None,
    blocked: int = 0,
) -> str:
    """Returns what is known about a rank; ``None`` and empty arguments: it has not started, answered or reported that.
    ``runs``: its wrapper could be asked. ``blocked``: its wrapper, or mpirun, if a signal has stopped that; else 0.

    >>> print(rank_report("rank 1", Start(1, "a", 7), Stacks(1, "runs", "main thread …")))
    rank 1 on a, PID 7 runs
      main thread …
    """
    if start is None:
        return f"{name} has not started"
    text = f"{name} on {start.host}, PID {start.pid}"
    if stacks is not None and stacks.state:
        text += f" {stacks.state}" + (f": kill -CONT {start.pid} continues it" if stacks.state == STOPPED else "")
    if doing:
        text += f", {doing}"
    if progress is not None and progress.last:
        steps = f", after {progress.steps} training steps" if progress.steps else ""
        text += f"\n  its last collective, {progress.ago:.0f} s ago{steps}: {progress.last}"
    if stacks is not None:
        return f"{text}\n{textwrap.indent(stacks.text, '  ')}"
    if not runs:
        return text
    why = "its wrapper did not answer, or mpirun cannot ask it"
    if blocked:
        why = f"process {blocked} above it, its wrapper or mpirun, {STOPPED}: kill -CONT {blocked} continues it"
    return f"{text}\n  (no stack: {why})"


def stall_report(stall: Stall, missing: Sequence[str]) -> str:
    """Returns the report of a stall, with those of the ranks that are missing.

    >>> stall = Stall("rank 0 has waited 60 s for rank 1 in barrier()", (1,), since=0.0)
    >>> print(stall_report(stall, ["rank 1 on a …"]).partition(", since ")[0])
    chorosrun: rank 0 has waited 60 s for rank 1 in barrier()
    """
    missing = sorted(missing, key=lambda each: "stopped" not in each.partition("\n")[0])
    since = time.strftime("%H:%M:%S", time.localtime(stall.since))
    lines = [f"chorosrun: {stall.text}, since {since}. What {'it does' if len(missing) == 1 else 'they do'}:"]
    lines += [textwrap.indent(each, "  ") for each in missing[:_MOST_STACKS]]
    if len(missing) > _MOST_STACKS:
        lines.append(f"  and {len(missing) - _MOST_STACKS} more: `choros stacks` shows all")
    return "\n".join(lines)
