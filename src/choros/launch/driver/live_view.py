"""The live view that ``chorosrun --view`` starts: ``choros top``, a child process on the terminal.

::

    chorosrun ── writes ──► held, while the view has the terminal ──► the terminal, once it has left, however it did
        └─────── record ──► choros top, which shows the last lines of it
"""

import os
import signal
import subprocess
import sys
import termios
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, final

from choros import durations
from choros.launch.driver.output import write_screen

#: Of what is held, the last bytes are kept.
_MOST_HELD = 1 << 20
#: What a view that was killed could not do: leave the alternate screen, show the cursor, let go of mouse and keys.
_RESTORE = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1004l\x1b[?2004l\x1b[<u\x1b[0m"


def view_problem(environ: Mapping[str, str]) -> str | None:
    """Returns why there can be no view, empty if that needs no word; ``None`` if there can be one."""
    if not all(os.isatty(each) for each in range(3)) or environ.get("TERM") == "dumb":
        return ""
    return "the view needs Textual: pip install 'choros[view]'" if find_spec("textual") is None else None


@final
class LiveView:
    """The view's process; ``write`` is where chorosrun writes meanwhile, from the main thread."""

    def __init__(self) -> None:
        self._terminal = termios.tcgetattr(0)
        self._held: deque[tuple[int, bytes]] = deque()
        self._bytes = self._left_out = 0
        self._has_terminal = True
        self._previous: Any = signal.signal(signal.SIGCHLD, self._on_child)
        self._process = subprocess.Popen([sys.executable, "-P", "-m", "choros", "top", "--of-chorosrun"])

    def write(self, descriptor: int, data: bytes) -> None:
        """Writes what is held and ``data``, or holds it, too."""
        self._held.append((descriptor, data))
        self._bytes += len(data)
        while self._has_terminal and self._bytes > _MOST_HELD:
            dropped = len(self._held.popleft()[1])
            self._bytes, self._left_out = self._bytes - dropped, self._left_out + dropped
        self._release()

    def close(self) -> None:
        """Ends the view, if it has not left, and writes what is held."""
        signal.signal(signal.SIGCHLD, self._previous)
        self._process.terminate()
        try:
            self._process.wait(durations.VIEW_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(OSError):
            self._release()

    def _on_child(self, *_: object) -> None:
        """Called when a child has ended, maybe another one."""
        with suppress(OSError):  # nothing reads the terminal any more: the next write says so
            self._release()

    def _release(self) -> None:
        if self._has_terminal:
            if self._process.poll() is None:
                return
            self._has_terminal = False
            self._take_terminal()
        while self._held:
            descriptor, data = self._held.popleft()
            write_screen(descriptor, data)

    def _take_terminal(self) -> None:
        with suppress(OSError, termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, self._terminal)
            if self._process.returncode != 0:
                write_screen(2, _RESTORE)
        if self._left_out:
            self._held.appendleft((2, f"chorosrun: the view has hidden {self._left_out} bytes of output.\n".encode()))
