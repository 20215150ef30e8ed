"""Jobs that are told to end: saved at one step on all processes, and gone on with later."""

from choros.distribute.preemption.handler import PreemptionCheckpointHandler
from choros.distribute.preemption.keras_checkpoint import KerasCheckpoint
from choros.distribute.preemption.termination import TerminationConfig

__all__ = ["KerasCheckpoint", "PreemptionCheckpointHandler", "TerminationConfig"]
