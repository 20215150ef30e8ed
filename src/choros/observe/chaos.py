"""Faults that are injected on purpose: ranks that are killed or stopped at a step, to see what the job does.

::

    kill:rank=1@step=17,stop:rank=2@step=30+5s,random-kills=3@step=1-50,seed=7

A listener of the begin of steps injects them, so that a job without faults has no cost. Ranks are those that chorosrun
shows; a rank that takes the place of a killed one is not killed again.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from choros.config import CHAOS, Config
from choros.errors import ConfigError
from choros.observe.events import Event, Kind, Listener
from choros.topology import detect

__all__ = ["Fault", "close", "kinds", "make", "parse_faults", "wanted"]

_log = logging.getLogger("choros")

_FAULT = re.compile(r"(?P<kind>kill|stop):rank=(?P<rank>\d+)@step=(?P<step>\d+)(?:\+(?P<seconds>\d+(?:\.\d+)?)s)?")
_RANDOM = re.compile(r"random-kills=(?P<count>\d+)(?:@step=(?P<first>\d+)-(?P<last>\d+))?")
_SEED = re.compile(r"seed=(\d+)")
_GRAMMAR = (
    "Write faults with commas between them: kill:rank=1@step=17 (SIGKILL when the step begins), "
    "stop:rank=2@step=30+5s (SIGSTOP, for 5 seconds), random-kills=3@step=1-50 (three ranks, each at one of these "
    "steps, by default the first hundred, drawn from seed=7). The first step is 1."
)


@dataclass(frozen=True, order=True)
class Fault:
    """A fault of one rank.

    Attributes:
        step: the step at whose begin it is injected; the first one is 1.
        rank: the rank.
        seconds: how long the rank is stopped; 0: it is killed.
    """

    step: int
    rank: int
    seconds: float = 0.0


def parse_faults(text: str, size: int) -> tuple[Fault, ...]:
    """Returns the faults that ``text`` describes, in the order of their steps; equal texts have equal faults.

    Args:
        text: the description.
        size: the number of ranks.

    Raises:
        ConfigError: it is malformed, or names a rank that the job does not have.

    Example:
        >>> parse_faults("stop:rank=2@step=30+5s,kill:rank=1@step=17", size=3)
        (Fault(step=17, rank=1, seconds=0.0), Fault(step=30, rank=2, seconds=5.0))
        >>> parse_faults("random-kills=2@step=1-9,seed=7", 4) == parse_faults("seed=7,random-kills=2@step=1-9", 4)
        True
    """
    faults: list[Fault] = []
    draws: list[re.Match[str]] = []
    seed = 0
    for part in (part.strip() for part in text.split(",")):
        if match := _FAULT.fullmatch(part):
            if (match["kind"] == "stop") != (match["seconds"] is not None):
                raise ConfigError(f"--chaos {text!r}: {part!r}: a stop, and no kill, has a time. {_GRAMMAR}")
            faults.append(Fault(int(match["step"]), int(match["rank"]), float(match["seconds"] or 0)))
        elif match := _RANDOM.fullmatch(part):
            draws.append(match)
        elif match := _SEED.fullmatch(part):
            seed = int(match[1])
        else:
            raise ConfigError(f"--chaos {text!r}: {part!r} is no fault. {_GRAMMAR}")
    for draw in draws:
        count, first, last = map(int, (draw["count"], draw["first"] or 1, draw["last"] or 100))
        if count > size or first > last:
            raise ConfigError(
                f"--chaos {text!r}: {draw[0]!r} asks for {count} of {size} ranks at {first}-{last}. {_GRAMMAR}"
            )
        source = random.Random(seed)  # noqa: S311  (not for secrets)
        faults += [Fault(source.randint(first, last), rank) for rank in source.sample(range(size), count)]
    for fault in faults:
        if fault.rank >= size or fault.step < 1:
            raise ConfigError(
                f"--chaos {text!r}: rank {fault.rank}, step {fault.step}: the job has ranks 0 to {size - 1}. {_GRAMMAR}"
            )
    return tuple(sorted(faults))


def kinds() -> tuple[Kind, ...]:
    """The kinds of events that inject faults."""
    return (Kind.STEP_BEGUN,)


def wanted(config: Config, environ: Mapping[str, str]) -> bool:  # noqa: ARG001  (see ListenerSpec)
    """Whether this rank has faults: one that was started later has none."""
    return bool(CHAOS.read(environ)) and "OMPI_PARENT_PORT" not in environ


def make(config: Config, environ: Mapping[str, str]) -> Listener:  # noqa: ARG001  (see ListenerSpec)
    """Returns the listener that injects the faults of this rank."""
    own = detect(environ)
    faults = parse_faults(CHAOS.read(environ), own.size)
    return _Injector([fault for fault in faults if fault.rank == own.rank])


def close(listener: Listener) -> None:
    """Warns of faults of this rank whose steps it has not made."""
    if isinstance(listener, _Injector) and (
        later := [fault for fault in listener.faults if fault.step > listener.steps]
    ):
        _log.warning(
            "--chaos: rank %d ends after %d steps; it was to be %s in step %d.",
            later[0].rank, listener.steps, "stopped" if later[0].seconds else "killed", later[0].step,
        )  # fmt: skip


@final
class _Injector:
    """Counts the steps of this process, and injects its faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = faults
        self.steps = 0

    def __call__(self, _event: Event) -> None:
        self.steps += 1
        for fault in self.faults:
            if fault.step == self.steps:
                _inject(fault)


def _inject(fault: Fault) -> None:
    me = os.getpid()
    if not fault.seconds:
        os.kill(me, signal.SIGKILL)
    # A child continues this process, which it outlives by nothing: the wrapper ends it, too.
    subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds:g}; kill -CONT {me}"], stdin=subprocess.DEVNULL)
    os.kill(me, signal.SIGSTOP)
