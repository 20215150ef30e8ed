"""The texts about ranks that others wait for: who they are, what they do, and their stacks. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from choros.launch.driver.waits import Stall
from choros.launch.protocol.frames import RankProgress, Stacks, Start
from choros.observe.stacks import STOPPED

__all__ = ["RankReport", "job_report", "stall_report"]

#: A report names all ranks that are missing, and shows the stacks of the first ones.
_MOST_STACKS = 8


@dataclass(frozen=True)
class RankReport:
    """What is known about a rank.

    Attributes:
        name: its name.
        start: its host and its process; ``None`` if it has not started.
        stacks: what its wrapper says; ``None`` if it has not answered.
        runs: whether its wrapper could be asked.
        doing: what it has reported; empty if it has not.
        progress: what it has done; ``None`` if its wrapper has not sent it.
        blocked: its wrapper, or mpirun, if that is stopped by a signal; else 0.
    """

    name: str
    start: Start | None
    stacks: Stacks | None
    runs: bool = True
    doing: str = ""
    progress: RankProgress | None = None
    blocked: int = 0

    def __str__(self) -> str:
        return "\n".join([self._head(), *self._stack()])

    def _head(self) -> str:
        if self.start is None:
            return f"{self.name} has not started"
        where = f"{self.name} on {self.start.host}, PID {self.start.pid}"
        state = self.stacks.state if self.stacks is not None else ""
        if state == STOPPED:
            state += f": kill -CONT {self.start.pid} continues it"
        parts = [f"{where} {state}" if state else where, *([self.doing] if self.doing else [])]
        return ", ".join(parts) + self._last()

    def _last(self) -> str:
        """What it did last."""
        done = self.progress
        if done is None or not done.last:
            return ""
        steps = f", after {done.steps} training steps" if done.steps else ""
        return f"\n  its last collective, {done.ago:.0f} s ago{steps}: {done.last}"

    def _stack(self) -> list[str]:
        if self.stacks is not None:
            return [textwrap.indent(self.stacks.text, "  ")]
        if self.start is None or not self.runs:
            return []
        if self.blocked:
            above = f"process {self.blocked} above it, its wrapper or mpirun, {STOPPED}"
            return [f"  (no stack: {above}: kill -CONT {self.blocked} continues it)"]
        return ["  (no stack: its wrapper did not answer, or mpirun cannot ask it)"]


def stall_report(stall: Stall, missing: Sequence[RankReport]) -> str:
    """Returns the report of a stall.

    Example:
        >>> stall = Stall("rank 0 has waited 60 s for rank 1 in barrier()", (1,), since=0.0)
        >>> answer = Stacks(1, "runs", "main thread …")
        >>> print(stall_report(stall, [RankReport("rank 1", Start(1, "a", 7), answer)]).partition(", since ")[0])
        chorosrun: rank 0 has waited 60 s for rank 1 in barrier()
        >>> print(RankReport("rank 1", Start(1, "a", 7), answer))
        rank 1 on a, PID 7 runs
          main thread …
    """
    missing = sorted(missing, key=lambda each: "stopped" not in each._head())
    since = time.strftime("%H:%M:%S", time.localtime(stall.since))
    lines = [f"chorosrun: {stall.text}, since {since}. What {'it does' if len(missing) == 1 else 'they do'}:"]
    lines += [textwrap.indent(str(each), "  ") for each in missing[:_MOST_STACKS]]
    if len(missing) > _MOST_STACKS:
        lines.append(f"  and {len(missing) - _MOST_STACKS} more: `choros stacks` shows all")
    return "\n".join(lines)


def job_report(ranks: Sequence[RankReport]) -> str:
    """Returns the stacks of all ranks; equal ones are shown once."""
    return "".join(f"{each}\n" for each in ranks)
