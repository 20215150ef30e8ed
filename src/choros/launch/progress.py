"""The line of a notebook's cell that says how many ranks run, and for how long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from choros.observe import events
from choros.observe.events import Event, Kind


@contextmanager
def shown_progress() -> Iterator[None]:
    """In a notebook, shows above the output how many ranks run, and for how long, while the block runs."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        yield
        return

    running: set[int] = set()
    began, ended = time.monotonic(), threading.Event()

    def text() -> dict[str, str]:
        number = f"{len(running)} rank{'s' * (len(running) != 1)}"
        what = "ended after" if ended.is_set() else f"{number} running:" if running else "starting:"
        return {"text/plain": f"choros: {what} {time.monotonic() - began:.0f} s"}

    def note(event: Event) -> None:
        (running.add if event.kind is Kind.RANK_STARTED else running.discard)(event.rank)

    def tick() -> None:
        while not ended.wait(1):
            shown.update(text(), raw=True)

    shown, clock = (
        ipython.display.display(text(), raw=True, display_id=True),
        threading.Thread(target=tick, daemon=True),
    )
    stop_listening = events.listen(note, {Kind.RANK_STARTED, Kind.RANK_ENDED})
    clock.start()
    try:
        yield
    finally:
        stop_listening()
        ended.set()
        clock.join()
        shown.update(text(), raw=True)
