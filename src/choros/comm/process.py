"""What ``init`` changes in this process besides the job: its log, its standard files, its listeners, and its end."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import final

from choros.errors import PeerLostError
from choros.observe import events
from choros.observe.listeners import start_listeners
from choros.observe.progress import open_page
from choros.settings import Config

_log = logging.getLogger("choros")


@final
class Listeners:
    """The listeners of this process: they listen from ``init`` to ``shutdown``, and again while the process ends."""

    def __init__(self) -> None:
        self._start: Callable[[], Callable[[], None]] = lambda: lambda: None
        self._stop: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._reports_end = False

    def begin(self, config: Config) -> None:
        """Starts those of this configuration, in ``init``."""
        start = partial(start_listeners, config, os.environ)
        with self._lock:
            self._stop = self._stop or start()
        self._start = start
        open_page()
        if events.Kind.SCRIPT_ENDED in events.heard and not self._reports_end:
            self._reports_end = True
            threading.Thread(target=self._report_end, name="choros: end of the script", daemon=True).start()

    def start(self) -> None:
        """Starts the configured listeners, if they are not running."""
        with self._lock:
            if self._stop is None:
                self._stop = self._start()

    def stop(self) -> None:
        """Stops them."""
        with self._lock:
            if self._stop is not None:
                self._stop()
            self._stop = None

    def _report_end(self) -> None:
        """Reports the end of the script, after which handlers and other threads may keep this rank alive."""
        threading.main_thread().join()
        self.start()
        events.emit(events.Kind.SCRIPT_ENDED)


def show_log(config: Config) -> None:
    """Shows what choros logs on standard error, unless the program has set a level and handlers."""
    if _log.level == logging.NOTSET:
        _log.setLevel(config.log_level)
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        # Not where another handler does, too: Keras and TensorFlow add one when they log.
        handler.addFilter(lambda _: {*_log.handlers, *logging.getLogger().handlers} == {handler})
        time = "%(asctime)s " if config.log_time else ""
        handler.setFormatter(logging.Formatter(f"{time}%(name)s: %(message)s"))
        _log.addHandler(handler)


def open_standard_files() -> None:
    """Opens /dev/null where a standard file is closed: else a connection of MPI's gets its place and the output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


@cache
def exit_with_code_of_loss() -> None:
    """From now on, a ``PeerLostError`` that nothing catches ends the program with its ``exit_code``, not with 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        previous(kind, error, traceback)
        if isinstance(error, PeerLostError):
            raise SystemExit(error.exit_code)  # Python then ends as after sys.exit() in the program

    sys.excepthook = hook
