"""The resident memory of this process, as the kernel counts it: pages in use, those shared with others too."""

import resource
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: What makes the kernel count the peak anew.
_RESET_PEAK = "5"


def resident_bytes() -> int | None:
    """Returns what is resident now; ``None`` if the system has no /proc."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """Returns the most that was resident since the process began, or since ``reset_peak``.

    >>> peak_bytes() > 1 << 20
    True
    """
    known = _field("VmHWM")
    if known is not None:
        return known
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Makes ``peak_bytes`` begin anew; returns whether the kernel can."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
