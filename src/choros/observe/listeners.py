"""The listeners of a rank: a table from which ``init()`` starts those that are enabled."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from choros.config import Config
from choros.observe import chaos, log, pipe
from choros.observe.events import Kind, Listener, listen

__all__ = ["LISTENERS", "ListenerSpec", "start_listeners"]


@dataclass(frozen=True)
class ListenerSpec:
    """A listener that a rank may start.

    Attributes:
        wanted: returns whether it is enabled, given the configuration and the environment.
        make: returns the listener, given the same.
        kinds: returns the kinds of events it receives.
        close: called with the listener when it is removed; ``None`` if it holds nothing.
    """

    wanted: Callable[[Config, Mapping[str, str]], bool]
    make: Callable[[Config, Mapping[str, str]], Listener]
    kinds: Callable[[], Collection[Kind]] = lambda: tuple(Kind)
    close: Callable[[Listener], None] | None = None

    def start(self, config: Config, environ: Mapping[str, str]) -> Callable[[], None]:
        """Starts the listener; returns what removes it."""
        listener = self.make(config, environ)
        remove = listen(listener, self.kinds())

        def stop() -> None:
            remove()
            if self.close is not None:
                self.close(listener)

        return stop


LISTENERS: tuple[ListenerSpec, ...] = (
    ListenerSpec(pipe.wanted, pipe.make, pipe.kinds),  # to the wrapper, which forwards them to chorosrun
    ListenerSpec(chaos.wanted, chaos.make, chaos.kinds, chaos.close),  # chorosrun --chaos
    ListenerSpec(log.wanted, log.make),  # CHOROS_LOG_LEVEL=debug without chorosrun
)


def start_listeners(config: Config, environ: Mapping[str, str] = os.environ) -> list[Callable[[], None]]:
    """Starts the listeners that are enabled; returns for each a function that removes it."""
    return [spec.start(config, environ) for spec in LISTENERS if spec.wanted(config, environ)]
