"""The class of a distributed optimizer: a Keras optimizer whose ``apply`` first reduces the gradients.

Every Keras trainer calls ``apply``, and what follows in it sees the gradient of the global batch::

    train_step ──► apply(gradients) ──► [reduce over ranks] ──► clip ──► accumulate ──► update ──► EMA

The user's object gets a subclass of the same name: its state, saved name and Keras' fast paths by class stay.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np

from choros.comm import Reduction, Request
from choros.comm.joining import Participation
from choros.errors import ConfigError, StrategyError
from choros.parallel.objects import object_of_first
from choros.parallel.reduce.slices import check_process_set, log_memory
from choros.training.host_gradients import is_overwritten, nbytes, tensor_of
from choros.training.keras_internals import slice_variables
from choros.training.keras_internals.models import (
    BaseOptimizer,
    accumulators,
    apply_count,
    check_gradients,
    derive,
    inner_optimizers,
    innermost,
    loss_scale_in_creation,
    trained_variables,
)
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.replaced import own_class, replaced
from choros.training.sliced_optimizer import (
    apply_scaled,
    assign_whole,
    rebuild,
    slice_state,
    slices_of,
    state_of,
    undivided,
    whole_values,
)
from choros.training.sliced_state import Slices
from choros.training.tf_context import as_one_replica
from choros.training.thread import doing, thread
from choros.training.variables import broadcast_updates, value_of
from choros.training.weighting import current_step
from choros.training.whole_state import MEETING, WholeState, host_value

_ATTRIBUTE = "_choros_reducer"
_as_one_replica = as_one_replica if keras.backend.backend() == "tensorflow" else nullcontext


class _DistributedMixin:
    """The methods that a distributed optimizer runs before those of its own class."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients over the ranks, then applies them."""
        optimizer: Any = self
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            _build(optimizer, trainable_variables)
        variables = trained_by(self) if trainable_variables is None else trainable_variables
        reducer = _reducer(self)
        # Where another distributed optimizer applies updates through this one, they are reduced, too.
        is_reduced = thread.giving_reduced or thread.applying_updates
        reduced = list(grads) if is_reduced else self._reduce(grads, variables)
        _apply_reduced(self, reduced, trainable_variables)
        if reducer.is_due:
            # Slices are gathered, and the same on all ranks; what has updated them may not be.
            compared = list(variables)
            if reducer.slices is not None and isinstance(rate := optimizer.learning_rate, keras.Variable):
                compared.append(rate)  # which callbacks such as ReduceLROnPlateau change
            values = list(map(value_of, compared))
            for variable, value, healed in zip(compared, values, reducer.compare(compared, values), strict=True):
                if healed is not value:
                    variable.assign(healed)

    def apply_gradients(
        self,
        grads_and_vars: Any,
        skip_gradients_aggregation: bool = False,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Keras' own, or the user's, for gradients of all ranks; with one of the arguments of Keras 2, the caller has
        reduced them.
        """
        own: Any = super()
        reduces = experimental_aggregate_gradients and not skip_gradients_aggregation
        if reduces and own_class(self).apply_gradients is BaseOptimizer.apply_gradients:
            return own.apply_gradients(grads_and_vars)
        gradients, variables = zip(*grads_and_vars, strict=True)
        _build(self, variables)
        if reduces:
            reduced = self._reduce(gradients, variables)
            with doing("giving_reduced"):
                return own.apply_gradients(zip(reduced, variables, strict=True))
        reducer = _reducer(self)
        if _is_in_fit(reducer):
            raise StrategyError(
                "apply_gradients(…, skip_gradients_aggregation=True) in a train_step of fit: its gradients are those "
                "of this replica's rows, as tf.distribute's replica context has one replica there. Leave the argument "
                "out, and clip by the optimizer's clipnorm or global_clipnorm, or train by strategy.run."
            )
        slices = reducer.slices
        reduced = list(gradients) if slices is None else slices.cut(gradients, variables)
        reducer.ordering = None  # of the last reduction, which may have been in another function
        _apply_reduced(self, reduced, list(variables))
        return apply_count(self)

    def _reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        reducer = _reducer(self)
        micro_batches = _micro_batches_before(self)
        reduced: list[Any] = reducer.reduce(list(gradients), variables, trained_by(self), micro_batches)
        return reduced

    def build(self, variables: Any) -> None:
        """Creates the optimizer's state on ranks that keep it; by now an inner optimizer is known."""
        move_outwards(self)
        reducer = _reducer(self)
        if isinstance(self, keras.optimizers.LossScaleOptimizer) or innermost(self).use_ema:
            reducer.state_owner = None  # all ranks need the scale before an update, and the averages after the last one
        with _as_one_replica():
            if reducer.divides_state:
                check_process_set(reducer.process_set)
                with doing("building_slices"):
                    self.__class__ = own_class(self)
                    slices = Slices(self, variables, reducer.process_set, reducer.local)
                    reducer.state = WholeState(self, slices, reducer.synchronize)
                    slice_state(self, reducer.state)
                    self.__class__ = derive(type(self), _DistributedMixin)
                    super().build(slices.slice_variables)  # type: ignore[misc]
            elif reducer.has_state:
                super().build(variables)  # type: ignore[misc]
            else:
                BaseOptimizer.build(self, variables)
        log_memory(
            type(innermost(self)).__name__,
            sum(map(nbytes, variables)),
            partial(_state_bytes, self),
            reducer.process_set,
        )

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """``apply`` as JAX's trainer calls it; Keras' own calls ``apply``, ``LossScaleOptimizer``'s does not."""
        if _reducer(self).slices is not None:
            return _stateless_apply_in_slices(self, optimizer_variables, grads, trainable_variables)
        if isinstance(self, keras.optimizers.LossScaleOptimizer):
            reducer = _reducer(self)
            grads = reducer.reduce(grads, trained_variables(self), (), _micro_batches_before(self))
            updated = super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]
            return reducer.compare(trained_variables(self), updated[0]), updated[1]
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "loss_scale_factor" and (outer := loss_scale_in_creation()) is not None:
            move_outwards(outer)

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of ``var`` on its rank (Horovod's name)."""
        slices = _reducer(self).slices
        if slices is not None and slices.is_divided(var):
            raise ConfigError(
                f"{var.path} cannot become a variable of each rank's own: with shard_state, ranks have slices of it "
                "already. Register it before the optimizer is built, or leave shard_state out."
            )
        _reducer(self).local.append(var)


def _micro_batches_before(optimizer: Any) -> Any:
    """The calls of ``apply`` before this one, after the last of which gradients are reduced; with a loss scale they are
    in each: between two micro-batches the scale may change, and Keras leaves out one that overflows.
    """
    micro_batches = _reducer(optimizer).reducer.config.micro_batches
    if micro_batches > 1 and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return apply_count(optimizer)
    return micro_batches - 1


def _is_in_fit(reducer: OptimizerReducer) -> bool:
    """Whether this is a step of several replicas in a strategy's ``fit``, which averages their gradients."""
    averages = reducer.op is not None and reducer.op() is Reduction.AVERAGE
    return averages and reducer.active and current_step() is not None


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    if not optimizer.built:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)


def _apply_reduced(optimizer: Any, reduced: Sequence[Any], variables: Sequence[Any] | None) -> None:
    """Keras' own ``apply``, on ranks that keep the optimizer's state; ``None`` for all variables of the optimizer."""
    reducer = _reducer(optimizer)
    with doing("applying_updates"):
        if reducer.slices is not None:
            with _as_one_replica():
                _apply_in_slices(optimizer, reduced, trained_by(optimizer) if variables is None else variables)
        elif reducer.has_state:
            with _as_one_replica():
                own_class(optimizer).apply(optimizer, reduced, variables)
        if reducer.state_owner is not None:  # it alone makes the update: the others count it, and receive the values
            if not reducer.has_state:
                apply_count(optimizer).assign_add(1)
            trained = trained_variables(optimizer) if variables is None else variables
            broadcast_updates(trained, reducer.state_owner, heirs=())  # no other rank has the new values


def _apply_in_slices(optimizer: Any, reduced: Sequence[Any], variables: Sequence[Any]) -> None:
    """Keras' own ``apply`` for the slices of this rank; then all variables are gathered."""
    slices, reducer = slices_of(optimizer), _reducer(optimizer)
    check_gradients(optimizer, reduced, variables)
    gradients, own = slices.own_pairs(reduced, variables, reducer.ordering)
    reducer.check_start([each for each in variables if slices.is_divided(each)])
    slices.load()
    if keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        apply_scaled(optimizer, gradients, own)
    else:
        own_class(optimizer).apply(optimizer, gradients, own)
    slices.gather(state_of(optimizer).check_start)


def _stateless_apply_in_slices(optimizer: Any, state: Sequence[Any], gradients: Any, values: Sequence[Any]) -> Any:
    """``stateless_apply`` of the values of whole variables."""
    trained = slices_of(optimizer).variables
    if current_step() is None:
        state_of(optimizer).meet(optimizer, state)
    mapping = [*zip(trained, values, strict=True), *zip(optimizer.variables, state, strict=True)]
    with keras.StatelessScope(state_mapping=mapping) as scope:
        optimizer.apply(gradients)
    return tuple(list(map(scope.get_current_value, variables)) for variables in (trained, optimizer.variables))


def _state_bytes(optimizer: Any) -> tuple[int, int]:
    own, state = sum(map(nbytes, optimizer.variables)), _reducer(optimizer).state
    return own, own if state is None else sum(nbytes(slot.outline) for slot in state.slots)


def trained_by(optimizer: Any) -> list[Any]:
    """The variables of the model that a built optimizer trains, whole also where it has slices of them."""
    reducer = reducer_of(optimizer)
    return trained_variables(optimizer) if reducer is None or reducer.slices is None else reducer.slices.variables


def reducer_of(optimizer: Any) -> OptimizerReducer | None:
    """The reducer of a distributed optimizer's gradients; ``None`` for other optimizers."""
    return getattr(optimizer, _ATTRIBUTE, None)


def _reducer(optimizer: Any) -> OptimizerReducer:
    reducer: OptimizerReducer = getattr(optimizer, _ATTRIBUTE)
    return reducer


def wrap(optimizer: Any, reducer: OptimizerReducer) -> None:
    """Turns ``optimizer`` into a distributed optimizer, in place."""
    optimizer.__class__ = derive(type(optimizer), _DistributedMixin)
    # Bypasses Keras' attribute tracking: the reducer is not part of the optimizer's state.
    object.__setattr__(optimizer, _ATTRIBUTE, reducer)


def divide(optimizer: Any) -> None:
    """Gives each rank its slice of the state of a distributed optimizer that is built, if it is to have one."""
    reducer = _reducer(optimizer)
    if not optimizer.built or not reducer.divides_state:
        return
    values, variables = list(whole_values(optimizer)), trained_variables(optimizer)
    for each in dict.fromkeys((optimizer, innermost(optimizer))):
        slice_variables.unbuild(each, slice_variables.first_of(each))
    with keras.name_scope(optimizer.name):
        optimizer.build(variables)
    assign_whole(optimizer, values)
    state = state_of(optimizer)
    state.held = values[len(values) - len(state.slots) :]


def cut_anew(optimizer: Any, model: Any) -> None:
    """Cuts the slices of an optimizer's state anew, for the ranks that there are now, one slot at a time; all ranks
    call it between two steps. One that has joined since the slices were cut has none of them, and receives its own. The
    step of the ``model`` that is trained is compiled again.
    """
    reducer = _reducer(optimizer)
    reducer.model = weakref.ref(model)
    reducer.process_set.communicator.agree(_cut_request(reducer))
    _cut_anew(optimizer)


def _cut_request(reducer: OptimizerReducer) -> Request:
    return Request("slices of the optimizer's state", name=reducer.reducer.name)


def _cut_anew(optimizer: Any) -> None:
    reducer, state = _reducer(optimizer), state_of(optimizer)
    communicator = reducer.process_set.communicator
    reducer.synchronize()
    if state.slices.is_new:
        state.slices.join(state.slices.holders.without(state.slices.holders.members))
    with doing("building_slices"), _as_one_replica(), keras.name_scope(optimizer.name):
        holders, begun, values = object_of_first(
            lambda: (state.slices.holders, reducer.begun, list(map(host_value, undivided(optimizer))))
        )
        if not holders.has(communicator.launched[communicator.rank]):  # this rank has joined since
            for variable, value in zip(undivided(optimizer), values, strict=True):
                variable.assign(value)
            state.slices.join(holders)
            reducer.begun, state.held = begun, ()
        while True:
            slices = Slices(optimizer, state.slices.variables, reducer.process_set, reducer.local)
            new = WholeState(optimizer, slices, reducer.synchronize, state)
            parts: dict[int, Any] = {}
            for number in range(len(new.slots)):
                parts |= {position: np.array(each) for position, each in new.parts(number, state.whole(number)).items()}
            if slices.holders.members == communicator.launched:
                break
        reducer.state = new
        rebuild(optimizer, new)
        for position, part in parts.items():
            new.assign_part(position, part)
    model = reducer.model()
    if model is not None and model.train_function is not None:  # its next step has other slice variables
        # JAX remembers what it has compiled by the function.
        with replaced(model, train_step=partial(model.train_step)):
            model.make_train_function(force=True)


def move_outwards(optimizer: Any) -> bool:
    """Distributes the outer optimizer, if an inner one was: ranks must reduce before a check whether all is finite."""
    distributed = [inner for inner in inner_optimizers(optimizer) if reducer_of(inner) is not None]
    reducers = [inner.__dict__.pop(_ATTRIBUTE) for inner in distributed]
    for inner in distributed:
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
    variables = trained_by(optimizer)
    if reducer is None or not reducer.active or not variables:
        return {}
    communicator = reducer.process_set.communicator

    def update(reduced: list[Any], trained: Sequence[Any]) -> None:
        tensors = list(map(tensor_of, reduced))
        slices = reducer.slices
        _apply_reduced(optimizer, tensors if slices is None else slices.placed(tensors, trained), trained)

    def when_settled(function: Callable[..., None]) -> Callable[..., None]:
        return lambda *given: communicator.when_settled(partial(function, *given))

    if reducer.state_owner is not None:
        return reducer.participation(reducer.shared(variables), update)
    makes_updates = _makes_updates_of_others(optimizer)
    of_others = (when_settled(update), when_settled(partial(_accumulate, optimizer))) if makes_updates else ()
    part = reducer.participation(reducer.shared(variables), *of_others)
    if (commit := reducer.commit()) is not None:
        part = {**part, _commit_request(reducer): lambda _: communicator.when_settled(commit)}
    if reducer.slices is None:
        return part
    cut = partial(_cut_anew, optimizer)
    return {**part, MEETING: lambda _: None, _cut_request(reducer): lambda _: communicator.when_settled(cut)}


def _makes_updates_of_others(optimizer: Any) -> bool:
    """Whether all ranks make an update of which only some have rows."""
    reducer = _reducer(optimizer)
    if reducer.slices is not None:
        return True
    if keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False  # its ``apply`` works in compiled steps alone
    return reducer.reducer.may_repeat


def reduce_early(optimizer: Any) -> None:
    """Moves micro-batches' gradients into the optimizer's accumulators, on all ranks: no loss of a rank takes them."""
    reducer = reducer_of(optimizer)
    if reducer is None or not reducer.active or not accumulators(optimizer):
        return
    gradients = reducer.reduce_early(trained_by(optimizer))
    if reducer.has_state:
        _accumulate(optimizer, gradients)


def _accumulate(optimizer: Any, gradients: Sequence[tuple[Any, Any]]) -> None:
    own = accumulators(optimizer)
    numbers = {id(variable): number for number, variable in enumerate(trained_variables(optimizer))}
    for variable, gradient in gradients:
        own[numbers[id(variable)]].assign_add(gradient)


def commit_together(reducer: OptimizerReducer) -> None:
    """Commits on all ranks, also on those that have joined: each must have its slices of the same step::

    rank 0                   rank 1, which has joined
    step 8             ───►  makes its update
    agree(commit)      ───►  commits its slices of step 8
    """
    reducer.process_set.communicator.agree(_commit_request(reducer))
    if (commit := reducer.commit()) is not None:
        commit()


def _commit_request(reducer: OptimizerReducer) -> Request:
    return Request("commit", name=reducer.reducer.name)


def receive_weights(optimizer: Any) -> tuple[int, ...]:
    """Ends an epoch once all have joined: ranks without a last batch receive weights and optimizer state of one with.
    Returns the ranks of the last update, those with a batch first, as the launcher numbers them; none if all had one.
    """
    reducer = reducer_of(optimizer)
    if reducer is None:
        return ()
    process_set = reducer.process_set
    heirs = process_set.communicator.launched if _makes_updates_of_others(optimizer) else ()
    made = (*(reducer.reducer.trained or ()), *heirs)
    if (last := reducer.reducer.last_active(heirs)) is None:
        return ()
    if reducer.state_owner is None:
        trained = trained_variables(optimizer)
        received = list(filter(is_overwritten, trained))  # by the largest values of ranks with a batch
        if reducer.slices is None:
            received = [*reducer.shared(trained), *received, *optimizer.variables]
        broadcast_updates(received, process_set.ranks[last], process_set, heirs=made)
    return made
