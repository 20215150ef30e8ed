"""Remote optimizers: optimizers created in the scope, whose ``apply`` is executed by the parameter servers.

::

    train_step ─► apply(gradients) ─► one host call ─► accumulate ─► clip ─► push ═══► the servers' optimizer
                                                                               new values ◄═══╝
                      variables.assign ◄───────────────────────────────────────┘

As in choros.keras, the user's object is kept and its class is replaced by a subclass of the same name. On workers it
has no slots: the servers store them, and the chief has copies, which it saves and restores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import cloudpickle
import keras
import numpy as np
from numpy.typing import NDArray

from choros.arrays import ArraySpec, framework_adapter
from choros.distribute.parameter_server.gradients import Accumulator, Clipping
from choros.distribute.parameter_server.messages import OptimizerRecipe
from choros.distribute.parameter_server.placement import VariableKey
from choros.distribute.parameter_server.recipes import optimizer_config
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.session import ServerSession
from choros.distribute.parameter_server.slots import Slots
from choros.errors import ConfigError, StrategyError
from choros.training.distributed_optimizer import derive, own_class
from choros.training.keras_internals import (
    apply_count,
    decays,
    drop_empty_gradients,
    learning_rate_of,
    no_automatic_dependency_tracking,
    note_trained_variables,
    trained_variables,
)

__all__ = ["RemoteOptimizer", "add_remote_optimizer", "remote_optimizer_of", "remote_optimizers"]

Array = NDArray[Any]
_ATTRIBUTE = "_choros_remote_optimizer"
#: The worker applies these; the servers' optimizer must not apply them again.
_APPLIED_ON_WORKER = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor", "gradient_accumulation_steps")
#: Optimizers whose update of an element depends on the whole variable.
_NEED_WHOLE_VARIABLES = frozenset({"Adafactor", "Lamb", "Muon"})


@final
class RemoteOptimizer:
    """The connection of an optimizer of the scope to its counterparts on the servers.

    Args:
        optimizer: the user's optimizer.
        number: the optimizer's number in the scope.
        session: returns the session of this process.
        is_chief: whether this process is the chief, which keeps the optimizer's slots and does not apply it.
        undecayed: variables without weight decay, besides those for which the optimizer says so itself.

    Attributes:
        number: the optimizer's number in the scope.
        slots: the optimizer's slots; ``None`` on workers.
    """

    def __init__(
        self,
        optimizer: Any,
        number: int,
        session: Callable[[], ServerSession],
        *,
        is_chief: bool,
        undecayed: frozenset[VariableKey] = frozenset(),
    ) -> None:
        self.number = number
        self.slots = Slots(optimizer) if is_chief else None
        self._optimizer = optimizer
        self._session = session
        self._undecayed = undecayed
        self._recipe = b""
        self._registered = False
        self._accumulator: Accumulator | None = None

    @property
    def learning_rate(self) -> float | None:
        """The current learning rate; ``None`` if the optimizer follows a schedule, as the servers then do too."""
        schedule = isinstance(learning_rate_of(self._optimizer), keras.optimizers.schedules.LearningRateSchedule)
        return None if schedule else float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if isinstance(learning_rate_of(self._optimizer), keras.Variable) and self.learning_rate != value:
            self._optimizer.learning_rate = value

    def prepare(self) -> None:
        """Records the optimizer's class and configuration, while its variables can still be read."""
        config = optimizer_config(self._optimizer)
        config.update({name: None for name in _APPLIED_ON_WORKER if name in config})
        self._recipe = cloudpickle.dumps((own_class(self._optimizer), config))

    def update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Sends gradients to the servers and assigns the new values; works in compiled functions too."""
        if self.slots is not None:
            raise StrategyError(
                "an optimizer created in the scope of ParameterServerStrategy was applied on the chief, which only "
                "coordinates: pass the function that applies it to ClusterCoordinator.schedule()."
            )
        session = self._session()
        optimizer = self._optimizer
        self._check(session, variables)
        steps = optimizer.gradient_accumulation_steps or 1
        self._accumulator = self._accumulator or Accumulator(steps)
        clipping = Clipping(optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
        follows_schedule = isinstance(learning_rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule)
        rate = 0.0 if follows_schedule else optimizer.learning_rate
        # A batch that is only accumulated leaves the values unchanged.
        values = [variable.value for variable in variables] if steps > 1 else []

        def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
            now, *arrays = hosts
            grads, current = arrays[: len(variables)], arrays[len(variables) :]
            mean = self._accumulator.add(grads)  # type: ignore[union-attr]
            if mean is None:
                return [np.array(value) for value in current]
            self._register(session)
            return session.push(self.number, variables, clipping.apply(mean), None if follows_schedule else float(now))

        outputs = [ArraySpec(tuple(v.shape), _dtype(v)) for v in variables]
        adapter = framework_adapter(keras.backend.backend())
        inputs = [keras.ops.convert_to_tensor(rate, "float32"), *map(keras.ops.convert_to_tensor, gradients), *values]
        for variable, value in zip(variables, adapter.host_call(on_host, inputs, outputs), strict=True):
            variable.assign(value)

    def average(self) -> None:
        """Overwrites the variables with their moving averages, on the servers and in this process."""
        session = self._session()
        session.servers.average(self.number)
        session.pull()

    def _register(self, session: ServerSession) -> None:
        if self._registered:
            return
        optimizer = self._optimizer
        trained = {session.key_of(v): v for v in trained_variables(optimizer)}
        variables = {
            key: (decays(optimizer, v) and key not in self._undecayed, v.constraint) for key, v in trained.items()
        }
        session.register(self.number, OptimizerRecipe(self._recipe, variables))
        self._registered = True

    def _check(self, session: ServerSession, variables: Sequence[Any]) -> None:
        """Raises if a variable is sharded whose update needs the whole variable."""
        sharded = [variable for variable in variables if session.key_of(variable) in session.sharded]
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

    @no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def build(self, variables: Any) -> None:
        """Keras' ``build`` on the chief; workers record the variables and create no slots."""
        optimizer: Any = self
        slots = getattr(self, _ATTRIBUTE).slots
        if optimizer.built:
            return
        if slots is not None:
            slots.build(variables, super().build)  # type: ignore[misc]
            return
        note_trained_variables(optimizer, variables)

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
) -> RemoteOptimizer | None:
    """Replaces the class of ``optimizer`` by one that has the servers apply the gradients.

    Returns:
        The remote optimizer; ``None`` for a ``LossScaleOptimizer``, of which the servers apply the inner optimizer.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise StrategyError(
            "ParameterServerStrategy does not support MultiOptimizer: use one optimizer for all variables."
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    remote = RemoteOptimizer(optimizer, number, session, is_chief=is_chief, undecayed=undecayed)
    optimizer.__class__ = derive(type(optimizer), _RemoteApply)
    # Bypasses Keras' attribute tracking: this is not part of the optimizer's state.
    object.__setattr__(optimizer, _ATTRIBUTE, remote)
    return remote


def remote_optimizer_of(optimizer: Any) -> RemoteOptimizer | None:
    """Returns the remote optimizer of an optimizer that the servers apply; ``None`` for others."""
    return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def remote_optimizers(objects: ScopeObjects) -> dict[int, RemoteOptimizer]:
    """Returns the remote optimizers of all optimizers that the servers apply, by number."""
    return {remote.number: remote for item in objects if (remote := remote_optimizer_of(item)) is not None}


def _dtype(variable: Any) -> np.dtype[np.generic]:
    import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)

    dtype: np.dtype[np.generic] = np.dtype(variable.dtype)
    return dtype
