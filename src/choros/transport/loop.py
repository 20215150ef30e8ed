"""The event loop: one thread that waits for descriptors, deadlines and a condition; and the signal pipe, a descriptor
that becomes readable when a signal is caught, which wakes it.
"""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike


@final
class Loop:
    """Calls the callbacks of ready descriptors and expired deadlines, in the thread that runs it. Signal handlers may
    set deadlines if a ``SignalPipe`` wakes it. ``poll_seconds``: the longest time between checks of ``run``'s
    condition; ``None`` if every change of it comes with a ready descriptor, a signal or a deadline.

        >>> loop, rings = Loop(), []
        >>> loop.set_deadline("alarm", 0.01, lambda: rings.append("now"))
        >>> loop.run(until=lambda: bool(rings), seconds=10)
        True
    """

    def __init__(self, poll_seconds: float | None = 0.5) -> None:
        self._poll_seconds = poll_seconds
        self._selector = selectors.DefaultSelector()
        self._deadlines: dict[str, tuple[float, Callable[[], None]]] = {}

    def on_readable(self, source: FileDescriptorLike, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``source`` is readable or its other end is closed."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def on_writable(self, source: FileDescriptorLike, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``source`` is writable or its other end is closed."""
        self._selector.register(source, selectors.EVENT_WRITE, callback)

    def forget(self, source: FileDescriptorLike) -> None:
        """Stops waiting for ``source``; required before it is closed."""
        self._selector.unregister(source)

    def set_deadline(self, name: str, seconds: float | None, action: Callable[[], None]) -> None:
        """Calls ``action`` once, after ``seconds``, ``None``: never; replaces the deadline of this name."""
        if seconds is None:
            self.cancel(name)
        else:
            self._deadlines[name] = (time.monotonic() + seconds, action)

    def repeat(self, name: str, seconds: float, action: Callable[[], None]) -> None:
        """Calls ``action`` every ``seconds`` until the deadline of this name is cancelled."""

        def again() -> None:
            self.set_deadline(name, seconds, again)
            action()

        self.set_deadline(name, seconds, again)

    def cancel(self, *names: str) -> None:
        """Cancels deadlines; unknown names are ignored."""
        for name in names:
            self._deadlines.pop(name, None)

    def cancel_all(self) -> None:
        """Cancels all deadlines."""
        self._deadlines.clear()

    def run(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Waits until the condition ``until`` holds, for at most ``seconds``; returns whether it holds."""
        end = None if seconds is None else time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if end is not None and now >= end:
                return False
            remaining = None if end is None else end - now
            self._step([limit for limit in (self._poll_seconds, remaining) if limit is not None])
        return True

    def close(self) -> None:
        """Closes the loop's own descriptor, not those it waited for."""
        self._selector.close()

    def _step(self, limits: list[float]) -> None:
        now = time.monotonic()
        # A copy: a signal handler may set a deadline at any moment.
        waits = [max(0.0, when - now) for when, _ in list(self._deadlines.values())]
        for key, _ in self._selector.select(min([*limits, *waits], default=None)):
            if self._selector.get_map().get(key.fd) is key:  # not forgotten by an earlier callback
                key.data()
        now = time.monotonic()
        for name, (when, action) in sorted([*self._deadlines.items()], key=lambda item: item[1][0]):
            # An action may cancel or replace later deadlines.
            if now >= when and self._deadlines.get(name) == (when, action):
                del self._deadlines[name]
                action()


#: The size of Linux' struct signalfd_siginfo, and where in it the sender's process number is.
_INFO_BYTES, _SENDER = 128, slice(12, 16)
#: The size of a signal set of glibc and musl.
_SET_BYTES = 128
#: Those that end a job, or that are for its ranks.
_OF_JOBS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Handler = Callable[[int, FrameType | None], None]


def wake_only(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing, because Python itself writes the signal's number to the pipe."""


def signal_with_sender(number: signal.Signals) -> int | None:
    """Returns a descriptor for ``read_sender``, or ``None``; blocks the signal, also in children: they must unblock."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes  # takes 5 ms

    libc = ctypes.CDLL(None)
    chosen = ctypes.create_string_buffer(_SET_BYTES)
    libc.sigemptyset(chosen)
    libc.sigaddset(chosen, int(number))
    descriptor = int(libc.signalfd(-1, chosen, os.O_CLOEXEC | os.O_NONBLOCK))
    if descriptor < 0:
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    return descriptor


def read_sender(descriptor: int) -> int:
    """Returns the process that has sent the signal; 0 if it is not visible here."""
    return int.from_bytes(os.read(descriptor, _INFO_BYTES)[_SENDER], sys.byteorder)


@final
class SignalPipe:
    """Catches signals until ``close``, if made in the main thread; elsewhere it stays empty, as Python catches none.
    Handlers are called at once, even while that thread is blocked; ``wake_only`` for signals handled by ``read``.
    """

    def __init__(self, handlers: Mapping[signal.Signals, Handler]) -> None:
        self._handlers = handlers
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_writer = -1
        self._reader, self._writer = os.pipe()
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        if threading.current_thread() is threading.main_thread():
            self._previous_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number, handler in self._handlers.items():
                self._previous[number] = signal.signal(number, handler)

    def close(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous_writer)
        os.close(self._reader)
        os.close(self._writer)

    def __enter__(self) -> SignalPipe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._reader

    @property
    def has_more(self) -> bool:
        """Whether signals have arrived since the last ``read``."""
        ready = select.poll()
        ready.register(self._reader, select.POLLIN)
        return bool(ready.poll(0))

    def read(self) -> list[signal.Signals]:
        """Returns the signals that have arrived since the last call, of those that are caught."""
        try:
            return [signal.Signals(number) for number in os.read(self._reader, 256) if number in self._handlers]
        except BlockingIOError:
            return []


def caught_signals(numbers: Sequence[signal.Signals] = _OF_JOBS, handler: Handler = wake_only) -> SignalPipe:
    """Catches signals, by default those of jobs; not those that nohup ignores."""
    return SignalPipe({number: handler for number in numbers if signal.getsignal(number) != signal.SIG_IGN})
