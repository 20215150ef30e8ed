"""Remote optimizers: optimizers created in the scope, whose ``apply`` is executed by the parameter servers.

::

    train_step ─► apply(gradients) ─► one host call ─► accumulate ─► clip ─► push ═══► the servers' optimizer
                                                                               new values ◄═══╝
                      variables.assign ◄───────────────────────────────────────┘

As in choros.keras, a subclass of the same name replaces its class. The chief has copies of slots, workers none.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import cloudpickle
import keras
import numpy as np

from choros.arrays import ArraySpec, framework_adapter
from choros.comm import Array
from choros.errors import ConfigError, StrategyError
from choros.parallel.reduce.gradients import SparseRows
from choros.parameter_server.placement import VariableKey
from choros.parameter_server.recipes import current_rate, follows_schedule, optimizer_config
from choros.parameter_server.scope_objects import ScopeObjects
from choros.parameter_server.session import ServerSession
from choros.parameter_server.slots import Slots
from choros.training.keras_internals.models import (
    apply_count,
    check_known,
    decays,
    derive,
    drop_empty_gradients,
    learning_rate_of,
    note_trained_variables,
    trained_variables,
)
from choros.training.replaced import underived
from choros.training.thread import doing, thread

_ATTRIBUTE = "_choros_remote_optimizer"
#: The worker applies these; the servers' optimizer must not apply them again.
_APPLIED_ON_WORKER = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor", "gradient_accumulation_steps")
#: Optimizers whose update of an element depends on the whole variable.
_NEED_WHOLE_VARIABLES = frozenset({"Adafactor", "Lamb", "Muon"})


def clip(
    gradients: Sequence[Array],
    clipnorm: float | None = None,
    global_clipnorm: float | None = None,
    clipvalue: float | None = None,
) -> list[Array]:
    """Returns gradients clipped as an optimizer does, which has at most one limit; the global one needs all of them.

    >>> import numpy as np
    >>> clip([np.array([3.0]), np.array([4.0])], global_clipnorm=1.0)
    [array([0.6]), array([0.8])]
    """
    if clipnorm:
        return [_to_norm(gradient, _norm(gradient), clipnorm) for gradient in gradients]
    if global_clipnorm:
        norm = math.sqrt(sum(_norm(gradient) ** 2 for gradient in gradients))
        return [_to_norm(gradient, norm, global_clipnorm) for gradient in gradients]
    if clipvalue:
        return [np.clip(gradient, -clipvalue, clipvalue) for gradient in gradients]
    return list(gradients)


def _norm(gradient: Array) -> float:
    return float(np.linalg.norm(gradient.astype(np.float64).ravel()))


def _to_norm(gradient: Array, norm: float, limit: float) -> Array:
    return gradient if norm <= limit else gradient * np.asarray(limit / norm, gradient.dtype)


class _OfMicroBatches(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule for updates of so many batches each, which counts batches, as Keras does."""

    def __init__(self, schedule: Callable[[Any], Any], steps: int) -> None:
        self._schedule, self._steps = schedule, steps

    def __call__(self, step: Any) -> Any:
        return self._schedule((step + 1) * self._steps - 1)


@final
class RemoteOptimizer:
    """An optimizer of the scope and its counterparts on the servers; only the chief keeps slots, without applying it;
    ``undecayed`` are variables without weight decay besides those that the optimizer names, ``trained`` those that the
    chief has built it for, if it has.
    """

    def __init__(
        self,
        optimizer: Any,
        number: int,
        session: Callable[[], ServerSession],
        *,
        is_chief: bool,
        undecayed: frozenset[VariableKey] = frozenset(),
        trained: Sequence[VariableKey] = (),
    ) -> None:
        self.number = number
        self.slots = Slots(optimizer) if is_chief else None
        self._optimizer = optimizer
        self._session = session
        self._undecayed = undecayed
        self._trained = trained
        self._recipe = b""
        self._registered = False
        #: Of the batches since the last update, the sums of their gradients, and how many there are.
        self._sums: list[Array] = []
        self._seen = 0

    @property
    def learning_rate(self) -> float | None:
        """The current learning rate; ``None`` if the optimizer follows a schedule, as the servers then do too."""
        return None if follows_schedule(self._optimizer) else current_rate(self._optimizer)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if isinstance(learning_rate_of(self._optimizer), keras.Variable) and self.learning_rate != value:
            self._optimizer.learning_rate = value

    def count(self) -> None:
        """Sets the iterations to what the servers have counted, without batches that are only accumulated here."""
        updates = self._session().updates.get(self.number)
        if updates is not None:
            steps = self._optimizer.gradient_accumulation_steps or 1
            apply_count(self._optimizer).assign(updates * steps + self._seen)

    def note_trained(self, variables: Sequence[Any]) -> None:
        """Builds the optimizer of a worker, without slots: for the variables that the chief's has, if that is built."""
        known = self._session().variables_of(self._trained) if self._trained else []
        note_trained_variables(self._optimizer, known or variables)

    def prepare(self) -> None:
        """Records the optimizer's class and configuration, while its variables can still be read."""
        config = optimizer_config(self._optimizer)
        if (steps := self._optimizer.gradient_accumulation_steps) and follows_schedule(self._optimizer):
            config["learning_rate"] = _OfMicroBatches(config["learning_rate"], steps)
        config.update({name: None for name in _APPLIED_ON_WORKER if name in config})
        self._recipe = cloudpickle.dumps((underived(type(self._optimizer)), config))

    def update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Sends gradients to the servers and assigns the new values; works in compiled functions too."""
        if thread.tracing_step:
            return
        if self.slots is not None:
            raise StrategyError(
                "an optimizer created in the scope of ParameterServerStrategy was applied on the chief, which only "
                "coordinates: pass the function that applies it to ClusterCoordinator.schedule()."
            )
        session = self._session()
        optimizer = self._optimizer
        self._check(session, variables)
        steps = optimizer.gradient_accumulation_steps or 1
        limits = optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue
        scheduled = follows_schedule(optimizer)
        rate = 0.0 if scheduled else optimizer.learning_rate
        # A batch that is only accumulated leaves the values unchanged.
        values = [variable.value for variable in variables] if steps > 1 else []

        framework, shapes = keras.backend.backend(), [tuple(variable.shape) for variable in variables]
        adapter = framework_adapter(framework)
        # Keras' sums of batches are dense.
        as_rows = framework == "tensorflow" and steps == 1
        rows = [adapter.rows_of(gradient) if as_rows else None for gradient in gradients]
        indices = [each[0] for each in rows if each]
        gradients = [each[1] if each else gradient for each, gradient in zip(rows, gradients, strict=True)]

        def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
            now, *arrays = hosts
            grads, others = arrays[: len(variables)], arrays[len(variables) :]
            current, rows_of = others[len(indices) :], iter(others)
            mean = self.accumulated(grads, steps)
            if mean is None:
                return [np.array(value) for value in current]
            self._register(session)
            if not in_jit:  # where variables have no values
                session.push_assigned(variables)
            # Keras, too, clips the rows of sparse gradients as they are; after the global norm, they are dense.
            clipped = zip(rows, clip(mean, *limits), shapes, strict=True)
            pushed = [SparseRows(next(rows_of), each, shape) if row else each for row, each, shape in clipped]
            if optimizer.global_clipnorm:
                pushed = [each.merged() if isinstance(each, SparseRows) else each for each in pushed]
            return session.push(self.number, variables, pushed, None if scheduled else float(now))

        outputs = [ArraySpec(shape, np.dtype(v.dtype)) for shape, v in zip(shapes, variables, strict=True)]
        in_jit = framework == "jax" and adapter.is_symbolic(gradients)
        tensors = map(keras.ops.convert_to_tensor, (*gradients, *indices))
        inputs = [keras.ops.convert_to_tensor(rate, "float32"), *tensors, *values]
        new = adapter.host_call(on_host, inputs, outputs)
        with doing("receiving_values"):
            for variable, value in zip(variables, new, strict=True):
                variable.assign(value)

    def accumulated(self, gradients: Sequence[Array], steps: int) -> list[Array] | None:
        """Returns the mean of the last ``steps`` gradients, or ``None`` while there are fewer."""
        if steps == 1:
            return list(gradients)
        # Not in place: the framework owns these arrays.
        sums = zip(self._sums, gradients, strict=True) if self._seen else ((0, gradient) for gradient in gradients)
        self._sums = [total + gradient for total, gradient in sums]
        self._seen = (self._seen + 1) % steps
        return None if self._seen else [total / np.asarray(steps, total.dtype) for total in self._sums]

    def average(self) -> None:
        """Overwrites the variables with their moving averages, on the servers and in this process."""
        self._session().average(self.number)

    def _register(self, session: ServerSession) -> None:
        if self._registered:
            return
        optimizer = self._optimizer
        trained = {session.key_of(v): v for v in trained_variables(optimizer)}
        updated = {
            key: (decays(optimizer, v) and key not in self._undecayed, v.constraint) for key, v in trained.items()
        }
        session.register(self.number, self._recipe, updated)
        self._registered = True

    def _check(self, session: ServerSession, variables: Sequence[Any]) -> None:
        """Raises if a variable is sharded whose update needs the whole variable."""
        sharded = [variable for variable in variables if len(session.shards_of(variable)) > 1]
        name = type(self._optimizer).__name__
        if sharded and name in _NEED_WHOLE_VARIABLES:
            raise ConfigError(
                f"{name} needs whole variables, but the variable_partitioner shards {sharded[0].path!r}: use another "
                "optimizer, such as Adam, or no partitioner."
            )
        for variable in sharded:
            if variable.constraint is not None and not isinstance(variable.constraint, keras.constraints.NonNeg):
                raise ConfigError(
                    f"the constraint {type(variable.constraint).__name__} needs whole variables, but the "
                    f"variable_partitioner shards {variable.path!r}: let the partitioner return one shard for it."
                )


class _RemoteApply:
    """The methods that replace the optimizer's own."""

    def build(self, variables: Any) -> None:
        """Keras' ``build`` on the chief; workers record the variables and create no slots."""
        optimizer: Any = self
        slots = getattr(self, _ATTRIBUTE).slots
        if optimizer.built:
            return
        if slots is not None:
            slots.build(variables, super().build)  # type: ignore[misc]
            return
        getattr(self, _ATTRIBUTE).note_trained(variables)

    def load_own_variables(self, store: Any) -> None:
        """Keras' ``load_own_variables`` on the chief; workers have no slots and load nothing."""
        if getattr(self, _ATTRIBUTE).slots is not None:
            super().load_own_variables(store)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Sends the gradients to the servers, which apply them."""
        optimizer: Any = self
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            variables = trained_variables(optimizer)
        else:
            variables = list(trainable_variables)
            if not optimizer.built:
                optimizer.build(variables)
            check_known(optimizer, variables)
        grads, variables = drop_empty_gradients(optimizer, grads, variables)
        if (scale := optimizer.loss_scale_factor) is not None:
            grads = [gradient / scale for gradient in grads]
        getattr(self, _ATTRIBUTE).update(grads, variables)
        apply_count(optimizer).assign_add(1)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Overwrites the variables with their moving averages, on the servers too."""
        del var_list
        if self.use_ema:  # type: ignore[attr-defined]
            getattr(self, _ATTRIBUTE).average()


def add_remote_optimizer(
    optimizer: Any,
    number: int,
    session: Callable[[], ServerSession],
    *,
    is_chief: bool = False,
    undecayed: frozenset[VariableKey] = frozenset(),
    trained: Sequence[VariableKey] = (),
) -> RemoteOptimizer | None:
    """Makes the servers apply gradients, by a subclass; ``None`` for ``LossScaleOptimizer``: its inner one is used."""
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise StrategyError(
            "ParameterServerStrategy does not support MultiOptimizer: use one optimizer for all variables."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    remote = RemoteOptimizer(optimizer, number, session, is_chief=is_chief, undecayed=undecayed, trained=trained)
    optimizer.__class__ = derive(type(optimizer), _RemoteApply)
    # Bypasses Keras' attribute tracking: this is not part of the optimizer's state.
    object.__setattr__(optimizer, _ATTRIBUTE, remote)
    return remote


def remote_optimizers(objects: ScopeObjects) -> dict[int, RemoteOptimizer]:
    """Returns the remote optimizers of all optimizers that the servers apply, by number."""
    remotes = (vars(item).get(_ATTRIBUTE) for item in objects)
    return {remote.number: remote for remote in remotes if remote is not None}
