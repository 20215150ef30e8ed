"""What each rank has in memory of what is trained, as ``chorosrun --verbose`` logs it once; see ``choros memory``."""

import logging
from collections.abc import Callable

from choros.comm import ProcessSet, has_others

_log = logging.getLogger("choros")


def log_memory(optimizer: str, weights: int, state: Callable[[], tuple[int, int]], process_set: ProcessSet) -> None:
    """Logs on the first rank what a rank has; ``optimizer``: the name of its class; ``weights``, ``state``: bytes."""
    if has_others(process_set) and process_set.communicator.rank == 0 and _log.isEnabledFor(logging.INFO):
        _log.info("%s", memory_text(optimizer, weights, *state(), process_set.communicator.size))


def memory_text(optimizer: str, weights: int, own: int, whole: int, ranks: int) -> str:
    """What a rank has, as a sentence; of the state its ``own`` bytes, and those of one process.

    >>> memory_text("Adam", 4 << 20, 4 << 20, 8 << 20, 2)
    'memory of a rank: 4.0 MiB of weights, 4.0 MiB of gradients, 4.0 of 8.0 MiB of the state of Adam (shard_state).'
    >>> memory_text("SGD", 4 << 20, 0, 0, 2)
    'memory of a rank: 4.0 MiB of weights, 4.0 MiB of gradients, 0.0 MiB of the state of SGD.'
    """
    size = f"{weights / 2**20:.1f} MiB"
    if own < whole:
        kept, note = f"{own / 2**20:.1f} of {whole / 2**20:.1f} MiB", " (shard_state)"
    else:
        kept, note = f"{own / 2**20:.1f} MiB", ""
        if ranks > 1 and own >= weights > 0:
            note = f"; with shard_state about {own / ranks / 2**20:.1f} MiB"
    return f"memory of a rank: {size} of weights, {size} of gradients, {kept} of the state of {optimizer}{note}."
