"""How many micro-batches an update has: Horovod's argument, and Keras' own."""

from typing import Any

from choros.errors import ConfigError


def accumulation_steps(optimizer: Any, backward_passes: int) -> int:
    """Returns the number of micro-batches per update; sets Keras' accumulation if Horovod's argument requests it."""
    own = optimizer.gradient_accumulation_steps
    if backward_passes == 1:
        return int(own or 1)
    if own is not None:
        raise ConfigError(
            f"backward_passes_per_step={backward_passes} and the optimizer's own gradient_accumulation_steps={own} "
            "both set gradient accumulation: pass only one of them."
        )
    if optimizer.built:
        raise ConfigError(
            "backward_passes_per_step needs an optimizer that has not been built: its accumulators are created with "
            "the optimizer's other state. Create a new optimizer."
        )
    optimizer.gradient_accumulation_steps = backward_passes
    return backward_passes
