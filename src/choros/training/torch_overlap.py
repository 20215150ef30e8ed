"""Keras on torch: the exchange of gradients begins while ``loss.backward()`` still runs.

::

    train_step ─► loss.backward()                 ─► optimizer.apply(gradients)
                    │ hooks: full buckets start         │ combine: waits, gives the ranks' gradients
                    └───────────────────────────────────┘

Keras has made the gradients before ``apply`` is called, so hooks on its variables' torch parameters see them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.reduce.torch_backward import BackwardExchange

__all__ = ["TorchOverlap"]


@final
class TorchOverlap:
    """Combines the gradients of one optimizer's variables; what ``GradientReducer.reduce`` does, sooner.

    For optimizers that exchange after every backward pass.
    """

    def __init__(self, reducer: GradientReducer, examples: Callable[[], int | None]) -> None:
        """Takes the optimizer's reducer, whose configuration has ``bucket_bytes``.

        Args:
            reducer: does the exchange.
            examples: how many examples the batch now being trained on has; ``None`` outside of a training step,
                whose backward passes concern nobody else.
        """
        self._reducer = reducer
        self._examples = examples
        self._exchange: BackwardExchange | None = None

    def combine(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks together.

        Args:
            gradients: the tensors that ``loss.backward()`` has left; from the second call on, many are on their way.
            variables: the Keras variables they belong to. If they are others than the last time, those are watched
                from now on.

        Raises:
            ConfigError: gradients were changed between the backward pass and this call.
            MismatchError: ranks have different variables.
        """
        parameters = [variable.value for variable in variables]
        if self._exchange is None:
            self._exchange = BackwardExchange(self._reducer, parameters, overlap=True, examples=self._examples)
        return self._exchange.combine(parameters, gradients)
