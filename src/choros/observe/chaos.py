"""Faults that are injected on purpose, to see what the job does; a job without faults has no cost::

    kill:rank=1@step=17,stop:rank=2@step=30+5s,random-kills=3@step=1-50,seed=7

Ranks are those that chorosrun shows; a rank that takes the place of a killed one is not killed again.
"""

import logging
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.observe.events import Event, Kind, listen
from choros.settings import Config
from choros.topology import detect

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
    """A fault of one rank when ``step`` begins, the first being 1: stopped for ``seconds``; 0: killed."""

    step: int
    rank: int
    seconds: float = 0.0


def parse_faults(text: str, size: int) -> tuple[Fault, ...]:
    """Returns the faults in ``text``, by step; equal texts have equal faults, wrong ones a ``ConfigError``.

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
            if (match["kind"] == "stop") != (float(match["seconds"] or 0) > 0):
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


def start(config: Config, environ: Mapping[str, str]) -> Callable[[], None] | None:
    """Injects the faults of this rank; one that was started later has none. Warns of those whose steps never came."""
    if not config.chaos or "OMPI_PARENT_PORT" in environ:
        return None
    own = detect(environ)
    faults = [fault for fault in parse_faults(config.chaos, own.size) if fault.rank == own.rank]
    steps = 0

    def on_step(_event: Event) -> None:
        nonlocal steps
        steps += 1
        for fault in faults:
            if fault.step == steps:
                _inject(fault)

    remove = listen(on_step, (Kind.STEP_BEGUN,))

    def stop() -> None:
        remove()
        if later := [fault for fault in faults if fault.step > steps]:
            _log.warning(
                "--chaos: rank %d ends after %d steps; it was to be %s in step %d.",
                later[0].rank, steps, "stopped" if later[0].seconds else "killed", later[0].step,
            )  # fmt: skip

    return stop


def _inject(fault: Fault) -> None:
    me = os.getpid()
    if not fault.seconds:
        os.kill(me, signal.SIGKILL)
    # A child continues this process, which it outlives by nothing: the wrapper ends it, too.
    subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.seconds:g}; kill -CONT {me}"], stdin=subprocess.DEVNULL)
    os.kill(me, signal.SIGSTOP)
