"""What each rank has in memory of what is trained, as ``chorosrun --verbose`` logs it once; see ``choros memory``."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from choros.comm import ProcessSet, has_others

_log = logging.getLogger("choros")


class StateBytes(NamedTuple):
    """Bytes of an optimizer's state: this rank's, and those of one process."""

    own: int
    whole: int


def log_memory(optimizer: str, weights: int, state: Callable[[], StateBytes], process_set: ProcessSet) -> None:
    """Logs on the first rank what a rank has; ``optimizer`` is the name of its class, ``weights`` are bytes."""
    if has_others(process_set) and process_set.communicator.rank == 0 and _log.isEnabledFor(logging.INFO):
        _log.info("%s", memory_text(optimizer, weights, state(), process_set.communicator.size))


def memory_text(optimizer: str, weights: int, state: StateBytes, ranks: int) -> str:
    """What a rank has, as a sentence.

    >>> memory_text("Adam", 4 << 20, StateBytes(4 << 20, 8 << 20), 2)
    'memory of a rank: 4.0 MiB of weights, 4.0 MiB of gradients, 4.0 of 8.0 MiB of the state of Adam (shard_state).'
    >>> memory_text("SGD", 4 << 20, StateBytes(0, 0), 2)
    'memory of a rank: 4.0 MiB of weights, 4.0 MiB of gradients, 0.0 MiB of the state of SGD.'
    """
    size = f"{weights / 2**20:.1f} MiB"
    if state.own < state.whole:
        kept, note = f"{state.own / 2**20:.1f} of {state.whole / 2**20:.1f} MiB", " (shard_state)"
    else:
        kept, note = f"{state.own / 2**20:.1f} MiB", ""
        if ranks > 1 and state.own >= weights > 0:
            note = f"; with shard_state about {state.own / ranks / 2**20:.1f} MiB"
    return f"memory of a rank: {size} of weights, {size} of gradients, {kept} of the state of {optimizer}{note}."
