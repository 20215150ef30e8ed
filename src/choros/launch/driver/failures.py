"""How a rank has failed, in words. Pure."""

from __future__ import annotations

import re
import signal

from choros.launch.driver.stopping import signal_name
from choros.launch.plan.roles import Roles
from choros.launch.protocol.frames import Exit

__all__ = ["exception_name", "headline"]

_EXCEPTION = re.compile(r"^(?:  \| )?([A-Za-z_][\w.]*)(?::.*)?$")
_ADVICE: dict[int, str] = {
    signal.SIGKILL: "out of memory, or kill -9?",
    signal.SIGSEGV: "a bug in compiled code, or a library built for another machine?",
    signal.SIGBUS: "is shared memory (/dev/shm) full?",
    signal.SIGILL: "a library built for another processor?",
    signal.SIGABRT: "a library aborted; see its last messages.",
}


def headline(end: Exit, roles: Roles) -> str:
    """Returns how a rank has failed."""
    name = f"{roles.name(end.rank)} on {end.host}"
    if end.signal:
        advice = _ADVICE.get(end.signal, "")
        return f"{name} was killed by {signal_name(end.signal)} (signal {end.signal})" + (
            f": {advice}" if advice else ""
        )
    exception = exception_name(end.traceback or end.shown)
    return f"{name} failed with exit code {end.code}" + (f" ({exception})" if exception else "")


def exception_name(traceback: str) -> str:
    """Returns the name of the exception at the end of a traceback; empty if there is none.

    Example:
        >>> exception_name("Traceback (most recent call last):\\n  File …\\nchoros.errors.MismatchError: no\\nmore")
        'MismatchError'
    """
    lines = traceback.splitlines()
    begin = max((i for i, line in enumerate(lines) if "Traceback (most recent call last):" in line), default=None)
    for line in lines[begin + 1 :] if begin is not None else ():
        match = _EXCEPTION.match(line)
        if match is not None:
            return match[1].rsplit(".", 1)[-1]
    return ""
