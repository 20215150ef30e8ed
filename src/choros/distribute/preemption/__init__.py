"""Preemption: a job that must end is saved at the same step on all processes, and resumed later."""

from choros.distribute.preemption.handler import PreemptionCheckpointHandler
from choros.distribute.preemption.keras_checkpoint import KerasCheckpoint
from choros.distribute.preemption.termination import TerminationConfig

__all__ = ["KerasCheckpoint", "PreemptionCheckpointHandler", "TerminationConfig"]
