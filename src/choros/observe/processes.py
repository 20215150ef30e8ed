"""Processes as the kernel knows them: what they do, and their resident memory, with pages that they share with others;
and their Python stacks, as py-spy, another program, reads them: also if they are stopped, in an endless loop or in C.
``--nonblocking`` does not stop them, fails if a stack changes, and is asked again.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from choros import durations

#: What a process does that SIGSTOP has stopped.
STOPPED = "is stopped by a signal"

_ATTEMPTS = 4
#: Of a rank with many child processes, such as those of a DataLoader, the first ones.
_PROCESSES = 6
#: mpirun's time for a longer line grows with the square of its length.
_CHARACTERS = 24_000
#: Threads of choros that only wait, for the end of the process or of something else.
_OWN = ("choros: end of the script", "choros: ended iterators")
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for a disk or for a file of another host",
    "T": STOPPED,
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


def state_of(pid: int) -> str:
    """Returns what process ``pid`` does, as the kernel says: ``"runs"``, for example; empty if it is not known."""
    return _STATES.get(_status(pid)[0], "")


def parent_of(pid: int) -> int:
    """Returns the process that has started process ``pid``, or has inherited it; 0 if it is not known."""
    return _status(pid)[1]


def stopped_above(pid: int) -> int:
    """Returns the first process between this one and ``pid``, its descendant, that a signal has stopped; or 0."""
    above = parent_of(pid)
    while above not in (0, os.getpid()):
        if state_of(above) == STOPPED:
            return above
        above = parent_of(above)
    return 0


def _status(pid: int) -> tuple[str, int]:
    """Returns the state of a process, as the kernel abbreviates it, and its parent; ``("", 0)`` if it has gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def resident_bytes(pid: int | str = "self") -> int | None:
    """Returns what is resident of a process, this one by default; ``None`` if the system has no /proc."""
    return _memory(pid, "VmRSS")


def peak_bytes() -> int:
    """Returns the most that was resident of this process since it began, or since ``reset_peak``.

    >>> peak_bytes() > 1 << 20
    True
    """
    known = _memory("self", "VmHWM")
    if known is not None:
        return known
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> bool:
    """Makes ``peak_bytes`` begin anew; returns whether the kernel can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _memory(pid: int | str, name: str) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def take_stacks(pid: int) -> str:
    """Returns the stacks of process ``pid`` and of the Python processes below it, or why there are none."""
    program = _py_spy()
    if program is None:
        return "(no stack: py-spy is not installed on this host: pip install py-spy)"
    end = time.monotonic() + durations.STACKS
    tree = [pid, *_descendants(pid)]
    parts, problem = [], ""
    for each in tree[:_PROCESSES]:
        text, error = _ask(program, each, end)
        problem = problem or error
        if text:
            parts.append(text if each == pid else f"its child process {each} {state_of(each)}\n{text}")
    if len(tree) > _PROCESSES:
        parts.append(f"(and {len(tree) - _PROCESSES} more child processes)")
    text = "\n".join(parts) or f"(no stack: {problem or 'no thread of it runs Python any more'})"
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}\n…"


def stack_text(threads: Iterable[Mapping[str, Any]], main: int) -> str:
    """Returns stacks as Python writes them: thread ``main``, the process's number, first; equal stacks together.

    >>> frames = [{"name": "train", "filename": "train.py", "line": 1}]
    >>> print(stack_text([{"os_thread_id": 7, "thread_name": None, "frames": frames}], 7))
    main thread
      File "train.py", line 1, in train
    """
    stacks: dict[str, list[str]] = {}
    for thread in sorted(threads, key=lambda thread: thread.get("os_thread_id") != main):
        frames = thread["frames"]
        if not frames or thread.get("thread_name") in _OWN:
            continue
        is_main = thread.get("os_thread_id") == main
        name = "main thread" if is_main else f"thread {thread.get('thread_name') or thread.get('os_thread_id')}"
        lock = ", holds the interpreter's lock" if thread.get("owns_gil") else ""
        stacks.setdefault("\n".join(_frame(each) for each in reversed(frames) if not _starts(each)), []).append(
            name + lock
        )
    return "\n".join(f"{_listed(names)}\n{stack}" for stack, names in stacks.items())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _starts(frame: Mapping[str, Any]) -> bool:
    """Whether this is a frame with which every thread begins."""
    return "_bootstrap" in frame["name"] and frame["filename"].endswith("threading.py")


def _frame(frame: Mapping[str, Any]) -> str:
    import linecache  # takes 3 ms; only a rank whose stacks are wanted needs it

    name, line = frame["filename"], frame["line"]
    source = linecache.getline(name, line)
    code = f"\n    {source.strip()}" if source.strip() else ""
    return f'  File "{name}", line {line}, in {frame["name"]}{code}'


def _ask(program: str, pid: int, end: float) -> tuple[str, str]:
    """Returns the stacks of a process, and, if there are none, why."""
    problem = "there was no time left to read it"
    for _ in range(_ATTEMPTS):
        left = end - time.monotonic()
        if left <= 0:
            break
        try:
            done = subprocess.run(
                [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=left,
                check=False,
            )
            if done.returncode == 0:
                return stack_text(json.loads(done.stdout), pid), ""
            problem = _reason(done.stderr.decode("utf-8", "replace"))
        except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
            problem = f"py-spy: {error}"
    return "", problem


def _reason(message: str) -> str:
    """Returns the reason in py-spy's message of an error."""
    lines = [line.strip() for line in message.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return f"py-spy: {'; '.join(lines).removeprefix('Error: ') or 'it gave no reason'}"


def _py_spy() -> str | None:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    if os.access(beside, os.X_OK):
        return beside
    import shutil  # imports three compression libraries

    return shutil.which("py-spy")


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found
