"""What an optimizer does under ``CentralStorageStrategy``: one process updates, the others take over the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import keras
import numpy as np

from choros.arrays import ArraySpec, framework_adapter
from choros.comm import global_process_set
from choros.distribute.fit.gradients import ReplicaCombiner
from choros.training.combiner import Combiner, Update, own_class, passes_of
from choros.training.synchronizer import Synchronizer

__all__ = ["CentralCombiner"]

_OWNER = 0


@final
class CentralCombiner(Combiner):
    """Gradients are combined as by ``MirroredStrategy``; process 0 alone keeps the optimizer's state.

    Args:
        optimizer: the one whose gradients these are.
    """

    shares_state = False

    def __init__(self, optimizer: Any) -> None:
        self._combined = ReplicaCombiner(optimizer)

    @property
    def synchronizer(self) -> Synchronizer:
        """That of synchronous training."""
        return self._combined.synchronizer

    @property
    def has_state(self) -> bool:
        """Process 0 has."""
        return global_process_set.communicator.rank == _OWNER

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any], passes: Any) -> list[Any]:
        """The gradients of all replicas together."""
        return self._combined.combine(gradients, variables, passes)

    def apply(self, optimizer: Any, update: Update, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Steps (1) to (3)."""
        combined = self.combine(gradients, variables, passes_of(optimizer))
        if self.has_state:
            update(combined)
        else:
            passes_of(optimizer).assign_add(1)
        _take_over(variables)

    def join(self, optimizer: Any) -> None:
        """Takes part in the updates that others' batches bring: process 0 makes them even if it has no more itself."""
        synchronizer = self.synchronizer
        if not synchronizer.reducer.active:
            return
        variables = optimizer._trainable_variables

        def follow(combined: list[Any]) -> None:
            if self.has_state:
                own_class(optimizer).apply(
                    optimizer, [keras.ops.convert_to_tensor(each) for each in combined], variables
                )
            else:
                passes_of(optimizer).assign_add(1)
            _take_over(variables)

        synchronizer.follow(variables, follow)


def _take_over(variables: Sequence[Any]) -> None:
    """Gives every process the values of process 0, within a compiled step too."""
    communicator = global_process_set.communicator
    if communicator.size == 1:
        return
    values = [keras.ops.convert_to_tensor(variable) for variable in variables]
    outputs = [ArraySpec(tuple(v.shape), np.dtype(keras.backend.standardize_dtype(v.dtype))) for v in variables]

    def on_host(hosts: Sequence[Any]) -> Sequence[Any]:
        return [communicator.broadcast(host, _OWNER, name="variables") for host in hosts]

    received = framework_adapter(keras.backend.backend()).host_call(on_host, values, outputs)
    if communicator.rank != _OWNER:
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)
