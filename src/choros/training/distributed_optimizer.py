"""The class of a distributed optimizer: a Keras optimizer whose ``apply`` first reduces the gradients.

Every Keras trainer calls ``apply``, and what follows in it sees the gradient of the global batch::

    train_step ──► apply(gradients) ──► [reduce over ranks] ──► clip ──► accumulate ──► update ──► EMA

The user's object gets a subclass of the same name: its state, saved name and Keras' fast paths by class stay.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras

from choros.comm.joining import Participation
from choros.errors import ConfigError
from choros.training.keras_internals.models import (
    BaseOptimizer,
    accumulators,
    apply_count,
    export_like,
    inner_optimizers,
    trained_variables,
)
from choros.training.optimizer_reducer import OptimizerReducer, tensor_of
from choros.training.tf_context import as_one_replica
from choros.training.variables import broadcast_updates, value_of

_ATTRIBUTE = "_choros_reducer"
_as_one_replica = as_one_replica if keras.backend.backend() == "tensorflow" else nullcontext

_applying = threading.local()


def in_apply() -> bool:
    """Whether a distributed optimizer applies reduced gradients, in this thread: all ranks make the same updates."""
    return getattr(_applying, "inside", False)


class _DistributedMixin:
    """The methods that a distributed optimizer runs before those of its own class."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients over the ranks, then applies them."""
        optimizer: Any = self
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not optimizer.built:
                with keras.name_scope(optimizer.name):
                    optimizer.build(trainable_variables)
        variables = trained_variables(self) if trainable_variables is None else trainable_variables
        reducer: Any = reducer_of(self)
        micro_batches = apply_count(self) if reducer.reducer.config.micro_batches > 1 else 0
        reduced = reducer.reduce(list(grads), variables, micro_batches)
        _apply_reduced(self, reduced, trainable_variables)
        if reducer.is_due:
            values = list(map(value_of, variables))
            for variable, value, healed in zip(variables, values, reducer.compare(variables, values), strict=True):
                if healed is not value:
                    variable.assign(healed)

    def apply_gradients(
        self,
        grads_and_vars: Any,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Keras' own; for gradients that the caller has reduced, with one of the two arguments of Keras 2."""
        if experimental_aggregate_gradients and not skip_gradients_aggregation:
            return super().apply_gradients(grads_and_vars)  # type: ignore[misc]
        gradients, variables = zip(*grads_and_vars, strict=True)
        _apply_reduced(self, list(gradients), list(variables))
        return apply_count(self)

    def build(self, variables: Any) -> None:
        """Creates the optimizer's state on ranks that keep it; by now an inner optimizer is known."""
        move_outwards(self)
        with _as_one_replica():
            if reducer_of(self).has_state:  # type: ignore[union-attr]
                super().build(variables)  # type: ignore[misc]
            else:
                BaseOptimizer.build(self, variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """``apply`` as JAX's trainer calls it; Keras' own calls ``apply``, ``LossScaleOptimizer``'s does not."""
        optimizer: Any = self
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            mapping = list(zip(optimizer.variables, optimizer_variables, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                micro_batches = keras.ops.convert_to_tensor(apply_count(self))
            reducer: Any = reducer_of(self)
            if reducer.state_owner is not None:
                raise ConfigError(
                    "loss scaling on JAX updates the weights of every process, which CentralStorageStrategy does not: "
                    "use mixed_bfloat16, which needs no loss scale, or MirroredStrategy."
                )
            grads = reducer.reduce(grads, trained_variables(self), micro_batches)
            updated = super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
            return reducer.compare(trained_variables(self), updated[0]), updated[1]
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of ``var`` on its rank (Horovod's name)."""
        reducer_of(self).local.append(var)  # type: ignore[union-attr]


def _apply_reduced(optimizer: Any, reduced: Sequence[Any], variables: Sequence[Any] | None) -> None:
    """Keras' own ``apply``, on ranks that keep the optimizer's state; ``None`` for all variables of the optimizer."""
    reducer: Any = reducer_of(optimizer)
    _applying.inside = True
    try:
        if reducer.has_state:
            with _as_one_replica():
                own_class(optimizer).apply(optimizer, reduced, variables)
        if reducer.state_owner is not None:  # it alone makes the update: the others count it, and receive the values
            if not reducer.has_state:
                apply_count(optimizer).assign_add(1)
            trained = trained_variables(optimizer) if variables is None else variables
            broadcast_updates(trained, reducer.state_owner, heirs=())  # no other rank has the new values
    finally:
        _applying.inside = False


_derived_classes: dict[tuple[type, type], type] = {}


def derive(base: type, behaviour: type) -> type:
    """The subclass of ``base``, overridden by the mixin ``behaviour``, that is saved as ``base``; created only once."""
    derived = _derived_classes.get((base, behaviour))
    if derived is None:
        namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        derived = _derived_classes[base, behaviour] = type(base.__name__, (behaviour, base), namespace)
        export_like(derived, base)
    return derived


def own_class(optimizer: Any) -> Any:
    """The class that an optimizer had before ``derive`` replaced it."""
    return type(optimizer).__mro__[2]


def reducer_of(optimizer: Any) -> OptimizerReducer | None:
    """The reducer of a distributed optimizer's gradients; ``None`` for other optimizers."""
    return getattr(optimizer, _ATTRIBUTE, None)


def wrap(optimizer: Any, reducer: OptimizerReducer) -> None:
    """Turns ``optimizer`` into a distributed optimizer, in place."""
    optimizer.__class__ = derive(type(optimizer), _DistributedMixin)
    # Bypasses Keras' attribute tracking: the reducer is not part of the optimizer's state.
    object.__setattr__(optimizer, _ATTRIBUTE, reducer)


def move_outwards(optimizer: Any) -> bool:
    """Distributes the outer optimizer, if an inner one was: ranks must reduce before a check whether all is finite."""
    reducers = []
    for inner in inner_optimizers(optimizer):
        if reducer_of(inner) is not None:
            reducers.append(inner.__dict__.pop(_ATTRIBUTE))
            inner.__class__ = own_class(inner)
    if reducers and reducer_of(optimizer) is None:
        wrap(optimizer, reducers[0])
    return bool(reducers)


def participation(optimizer: Any) -> Participation:
    """How a rank without batches participates in the updates; nothing, if the optimizer is not built. A sole updater
    makes them even so, and the others receive its weights; in an elastic job all make them, so that none is lost with
    the last rank that has batches.
    """
    reducer = reducer_of(optimizer)
    variables = trained_variables(optimizer)
    if reducer is None or not reducer.reducer.active or not variables:
        return {}
    communicator = reducer.reducer.config.process_set.communicator

    def update(reduced: list[Any], trained: Sequence[Any]) -> None:
        _apply_reduced(optimizer, list(map(tensor_of, reduced)), trained)

    def update_when_settled(reduced: list[Any], trained: Sequence[Any]) -> None:
        communicator.when_settled(lambda: update(reduced, trained))

    if reducer.state_owner is not None:
        return reducer.participation(variables, update)
    shared = [variable for variable in variables if not reducer.is_local(variable)]
    return reducer.participation(shared, update_when_settled if _makes_updates_of_others(optimizer) else None)


def _makes_updates_of_others(optimizer: Any) -> bool:
    """Whether all ranks make an update of which only some have rows."""
    if keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False  # its ``apply`` works in compiled steps alone
    process_set = reducer_of(optimizer).reducer.config.process_set  # type: ignore[union-attr]
    return bool(process_set.included()) and process_set.communicator.elastic


def reduce_early(optimizer: Any) -> None:
    """Moves micro-batches' gradients into the optimizer's accumulators, on all ranks: no loss of a rank takes them."""
    reducer, own = reducer_of(optimizer), accumulators(optimizer)
    if reducer is None or not reducer.reducer.active or not own:
        return
    numbers = {id(variable): number for number, variable in enumerate(trained_variables(optimizer))}
    for variable, gradient in reducer.reduce_early():
        if reducer.has_state:
            own[numbers[id(variable)]].assign_add(gradient)


def receive_weights(optimizer: Any) -> tuple[int, ...]:
    """Ends an epoch once all have joined: ranks without a last batch receive weights and optimizer state of one with.
    Returns the ranks of the last update, those with a batch first, as the launcher numbers them; none if all had one.
    """
    reducer = reducer_of(optimizer)
    if reducer is None:
        return ()
    process_set = reducer.reducer.config.process_set
    heirs = process_set.communicator.launched if _makes_updates_of_others(optimizer) else ()
    if (last := reducer.reducer.last_active(heirs)) is None:
        return ()
    made = (*reducer.reducer.trained, *heirs)
    if reducer.state_owner is None:
        shared = [variable for variable in trained_variables(optimizer) if not reducer.is_local(variable)]
        broadcast_updates([*shared, *optimizer.variables], process_set.ranks[last], process_set, heirs=made)
    return made
