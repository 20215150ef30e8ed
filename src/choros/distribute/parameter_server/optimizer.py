"""An optimizer made in the scope: one whose ``apply`` has the parameter servers do it.

::

    train_step ─► apply(gradients) ─► one host call ─► accumulate ─► clip ─► push ═══► the servers' optimizer
                                                                               new values ◄═══╝
                      variables.assign ◄───────────────────────────────────────┘

As with choros.keras, the user's object is kept and its class replaced by a subclass of the same name. On workers it has
no slots: the servers have them, and the chief has copies, which it saves and restores.
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
from choros.distribute.parameter_server.scope_objects import ScopeObjects
from choros.distribute.parameter_server.session import Session
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

__all__ = ["Pusher", "lead", "pusher_of", "pushers"]

Array = NDArray[Any]
_ATTRIBUTE = "_choros_pusher"
#: What the worker does, so that the servers' optimizer must not.
_DONE_BEFORE = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor", "gradient_accumulation_steps")
#: These look at a variable as a whole.
_NEED_WHOLE_VARIABLES = frozenset({"Adafactor", "Lamb", "Muon"})


@final
class Pusher:
    """What an optimizer of the scope knows of the servers.

    Args:
        optimizer: whose it is.
        number: the optimizer's.
        session: gives this process's session, in which the optimizer is applied.
        leads: whether this is the chief, who keeps what the optimizer does, and does not apply it.

    Attributes:
        number: the optimizer's.
        slots: what it keeps; ``None`` on workers.
    """

    def __init__(self, optimizer: Any, number: int, session: Callable[[], Session], *, leads: bool) -> None:
        self.number = number
        self.slots = Slots(optimizer) if leads else None
        self._optimizer = optimizer
        self._session = session
        self._recipe = b""
        self._adopted = False
        self._accumulator: Accumulator | None = None

    @property
    def learning_rate(self) -> float | None:
        """The learning rate now, ``None`` if the optimizer follows a schedule, which the servers do as well."""
        schedule = isinstance(learning_rate_of(self._optimizer), keras.optimizers.schedules.LearningRateSchedule)
        return None if schedule else float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if isinstance(learning_rate_of(self._optimizer), keras.Variable) and self.learning_rate != value:
            self._optimizer.learning_rate = value

    def prepare(self) -> None:
        """Notes how the optimizer is made, while its variables can be read."""
        config = self._optimizer.get_config()
        config.update({name: None for name in _DONE_BEFORE if name in config})
        schedule = learning_rate_of(self._optimizer)
        follows = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
        config["learning_rate"] = schedule if follows else self.learning_rate
        self._recipe = cloudpickle.dumps((own_class(self._optimizer), config))

    def update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Has the servers apply gradients, and takes over the new values; also in a function that is being compiled."""
        if self.slots is not None:
            raise StrategyError(
                "an optimizer that was made in the scope of ParameterServerStrategy was applied on the chief, which "
                "only coordinates: pass the function that does so to ClusterCoordinator.schedule."
            )
        session = self._session()
        optimizer = self._optimizer
        self._check(session, variables)
        steps = optimizer.gradient_accumulation_steps or 1
        self._accumulator = self._accumulator or Accumulator(steps)
        clipping = Clipping(optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
        fixed = isinstance(learning_rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule)
        rate = 0.0 if fixed else optimizer.learning_rate
        # A batch that is only accumulated leaves the values as they are.
        values = [variable.value for variable in variables] if steps > 1 else []

        def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
            now, *arrays = hosts
            given, kept = arrays[: len(variables)], arrays[len(variables) :]
            mean = self._accumulator.add(given)  # type: ignore[union-attr]
            if mean is None:
                return [np.array(value) for value in kept]
            self._adopt(session)
            return session.push(self.number, variables, clipping.apply(mean), None if fixed else float(now))

        outputs = [ArraySpec(tuple(v.shape), _dtype(v)) for v in variables]
        adapter = framework_adapter(keras.backend.backend())
        inputs = [keras.ops.convert_to_tensor(rate, "float32"), *map(keras.ops.convert_to_tensor, gradients), *values]
        for variable, value in zip(variables, adapter.host_call(on_host, inputs, outputs), strict=True):
            variable.assign(value)

    def average(self) -> None:
        """Puts the moving averages in the place of the variables, on the servers and here."""
        session = self._session()
        session.servers.average(self.number)
        session.pull()

    def _adopt(self, session: Session) -> None:
        if self._adopted:
            return
        optimizer = self._optimizer
        variables = {session.key_of(v): (decays(optimizer, v), v.constraint) for v in trained_variables(optimizer)}
        session.adopt(self.number, OptimizerRecipe(self._recipe, variables))
        self._adopted = True

    def _check(self, session: Session, variables: Sequence[Any]) -> None:
        """Refuses what a server cannot do that has a part of a variable."""
        cut = [variable for variable in variables if session.key_of(variable) in session.sharded]
        name = type(self._optimizer).__name__
        if cut and name in _NEED_WHOLE_VARIABLES:
            raise ConfigError(
                f"{name} looks at variables as a whole, but the variable_partitioner cuts {cut[0].path!r}: use another "
                "optimizer, such as Adam, or no partitioner."
            )
        for variable in cut:
            if variable.constraint is not None and not isinstance(variable.constraint, keras.constraints.NonNeg):
                raise ConfigError(
                    f"the constraint {type(variable.constraint).__name__} looks at a variable as a whole, but the "
                    f"variable_partitioner cuts {variable.path!r}: let the partitioner leave it in one piece."
                )


class _Remote:
    """What the replaced class does in the place of the optimizer's own methods."""

    @no_automatic_dependency_tracking  # type: ignore[untyped-decorator]
    def build(self, variables: Any) -> None:
        """Keras' own on the chief; workers note the variables, and make no slots."""
        optimizer: Any = self
        slots = getattr(self, _ATTRIBUTE).slots
        if optimizer.built:
            return
        if slots is not None:
            slots.build(variables, super().build)  # type: ignore[misc]
            return
        note_trained_variables(optimizer, variables)

    def load_own_variables(self, store: Any) -> None:
        """Keras' own on the chief; workers, which do not have them, take none."""
        if getattr(self, _ATTRIBUTE).slots is not None:
            super().load_own_variables(store)  # type: ignore[misc]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Has the servers apply the gradients."""
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
        """Has the servers put moving averages in the place of variables."""
        del var_list
        if self.use_ema:  # type: ignore[attr-defined]
            getattr(self, _ATTRIBUTE).average()


def lead(optimizer: Any, pusher: Pusher) -> None:
    """Makes ``optimizer`` one that the servers apply, in place."""
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        raise StrategyError("ParameterServerStrategy knows no MultiOptimizer: use one optimizer for all variables.")
    optimizer.__class__ = derive(type(optimizer), _Remote)
    # Past Keras' attribute tracking: this is no state of the optimizer.
    object.__setattr__(optimizer, _ATTRIBUTE, pusher)


def pusher_of(optimizer: Any) -> Pusher | None:
    """The pusher of an optimizer that the servers apply; ``None`` for others."""
    return getattr(optimizer, "__dict__", {}).get(_ATTRIBUTE)


def pushers(objects: ScopeObjects) -> dict[int, Pusher]:
    """Those of all optimizers that the servers apply, by their numbers."""
    return {pusher.number: pusher for made in objects if (pusher := pusher_of(made)) is not None}


def _dtype(variable: Any) -> np.dtype[np.generic]:
    import ml_dtypes  # noqa: F401  (tells NumPy of bfloat16)

    dtype: np.dtype[np.generic] = np.dtype(variable.dtype)
    return dtype
