"""The class of a distributed optimizer: a Keras optimizer whose ``apply`` first asks a combiner for the gradients.

``Optimizer.apply`` is the one place that every Keras trainer passes, on all frameworks. Combining at its top
means that clipping, accumulation, weight decay and moving averages see the gradient of the global batch::

    train_step ──► apply(gradients) ──► [combine over ranks] ──► clip ──► accumulate ──► update ──► EMA

The user's optimizer object is kept, its class is replaced by a subclass of the same name: its state, its
saved name and the fast paths that Keras chooses by class stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.src import api_export
from keras.src.optimizers.base_optimizer import BaseOptimizer

from choros.errors import ConfigError

if TYPE_CHECKING:
    from choros.training.synchronizer import Synchronizer

__all__ = [
    "Combiner",
    "Update",
    "combiner_of",
    "derive",
    "move_outwards",
    "own_class",
    "passes_of",
    "synchronizer_of",
    "unwrap",
    "wrap",
]

Update = Callable[[list[Any]], None]
_ATTRIBUTE = "_choros_combiner"


class Combiner(ABC):
    """What makes the gradients of an update from those of the training step; one an optimizer."""

    @abstractmethod
    def combine(self, gradients: Sequence[Any], variables: Sequence[Any], passes: Any) -> list[Any]:
        """The gradients that this step's update is made from.

        Args:
            gradients: this rank's, ``None`` where a variable has none.
            variables: the Keras variables they belong to.
            passes: how many have been done so far.
        """

    @property
    @abstractmethod
    def synchronizer(self) -> Synchronizer:
        """What combines them in ``fit``."""

    @property
    @abstractmethod
    def has_state(self) -> bool:
        """Whether this rank keeps the optimizer's state, such as its moments."""

    @property
    @abstractmethod
    def shares_state(self) -> bool:
        """Whether all ranks do."""

    @abstractmethod
    def apply(self, optimizer: Any, update: Update, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Combines the gradients, then has ``update``, Keras' own ``apply``, change the variables."""

    @abstractmethod
    def join(self, optimizer: Any) -> None:
        """Goes along with the ranks that still have batches this epoch, until none has."""


class _Distributed:
    """What the replaced class does before the optimizer's own methods."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Combines the ranks' gradients, then applies them."""
        optimizer: Any = self
        grads = list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not optimizer.built:
                with keras.name_scope(optimizer.name):
                    optimizer.build(trainable_variables)
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        move_outwards(self)
        own = super().apply  # type: ignore[misc]
        combiner: Any = combiner_of(self)
        combiner.apply(self, lambda combined: own(combined, trainable_variables), grads, variables)

    def build(self, variables: Any) -> None:
        """Makes the optimizer's state, on ranks that keep it."""
        if combiner_of(self).has_state:  # type: ignore[union-attr]
            super().build(variables)  # type: ignore[misc]
        else:
            BaseOptimizer.build(self, variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """``apply`` as JAX's trainer calls it; Keras' own comes back to ``apply``, the loss scale's does not."""
        optimizer: Any = self
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            move_outwards(self)
            mapping = list(zip(optimizer.variables, optimizer_variables, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                passes = keras.ops.convert_to_tensor(passes_of(self))
            combiner: Any = combiner_of(self)
            if not combiner.shares_state:
                raise ConfigError(
                    "loss scaling on JAX updates the weights of every process, which CentralStorageStrategy does not: "
                    "use mixed_bfloat16, which needs no loss scale, or MirroredStrategy."
                )
            grads = combiner.combine(grads, optimizer._trainable_variables, passes)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of ``var`` on its rank (Horovod's name)."""
        synchronizer_of(self).add_local(var)  # type: ignore[union-attr]


_derived_classes: dict[tuple[type, type], type] = {}


def derive(base: type, behaviour: type) -> type:
    """A subclass of the optimizer class ``base`` that passes for it when the optimizer is saved; one for each.

    Args:
        base: a Keras optimizer's class.
        behaviour: its methods come before those of ``base``.
    """
    derived = _derived_classes.get((base, behaviour))
    if derived is None:
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        derived = _derived_classes[base, behaviour] = type(base.__name__, (behaviour, base), namespace)
        if (public_name := api_export.REGISTERED_OBJS_TO_NAMES.get(base)) is not None:
            api_export.REGISTERED_OBJS_TO_NAMES[derived] = public_name
    return derived


def own_class(optimizer: Any) -> Any:
    """The class that an optimizer had before it got a derived one."""
    return type(optimizer).__mro__[2]


def combiner_of(optimizer: Any) -> Combiner | None:
    """The combiner of a distributed optimizer; ``None`` for others."""
    return getattr(optimizer, _ATTRIBUTE, None)


def synchronizer_of(optimizer: Any) -> Synchronizer | None:
    """What combines the gradients of a distributed optimizer in ``fit``; ``None`` for others."""
    combiner = combiner_of(optimizer)
    return None if combiner is None else combiner.synchronizer


def wrap(optimizer: Any, combiner: Combiner) -> None:
    """Makes ``optimizer`` a distributed one, in place."""
    optimizer.__class__ = derive(type(optimizer), _Distributed)
    # Past Keras' attribute tracking: this is no state of the optimizer.
    object.__setattr__(optimizer, _ATTRIBUTE, combiner)


def unwrap(optimizer: Any) -> Combiner:
    """Takes back ``wrap``; gives the combiner to who wraps something around ``optimizer``."""
    combiner: Combiner = optimizer.__dict__.pop(_ATTRIBUTE)
    optimizer.__class__ = own_class(optimizer)
    return combiner


def move_outwards(optimizer: Any) -> bool:
    """Makes an optimizer of optimizers the distributed one, in place of those inside it.

    Ranks must exchange gradients before a ``LossScaleOptimizer`` asks whether they are finite: all get one answer.

    Returns:
        Whether there was anything to do.
    """
    inside = (getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", ()))
    combiners = [unwrap(inner) for inner in inside if combiner_of(inner) is not None]
    if combiners and combiner_of(optimizer) is None:
        wrap(optimizer, combiners[0])
    return bool(combiners)


def passes_of(optimizer: Any) -> Any:
    """The variable that counts ``apply``; ``optimizer.iterations`` counts updates, which may be fewer."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations
