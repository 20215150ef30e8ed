"""The event loop: one thread that waits for descriptors, deadlines and a condition; for signals as descriptors, too
(``SignalPipe``).
"""

import selectors
import time
from collections.abc import Callable
from typing import Protocol, final


class HasFileno(Protocol):
    """A file, socket or pipe."""

    def fileno(self) -> int:
        """Its descriptor."""


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

    def on_readable(self, source: HasFileno | int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``source`` is readable or its other end is closed."""
        self._selector.register(source, selectors.EVENT_READ, callback)

    def on_writable(self, source: HasFileno | int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``source`` is writable or its other end is closed."""
        self._selector.register(source, selectors.EVENT_WRITE, callback)

    def forget(self, source: HasFileno | int) -> None:
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
