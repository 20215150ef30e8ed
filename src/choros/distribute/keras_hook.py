"""The patches of Keras' classes that make plain ``model.fit`` use a strategy; no other module patches them.

While a scope is open or a replica runs, these notify the strategy; leaving the last scope restores them::

    with strategy.scope():
        model = Sequential(…) ──► Trainer.__init__ ───► this model's fit, evaluate, … delegate to strategy.training
        Adam()                ──► Optimizer.__init__ ─► strategy.training.optimizer_created
        Accuracy()            ──► Metric.__init__ ────► strategy.training.metric_created
        Dropout(…)            ──► SeedGenerator.__init__ ─► strategy.training.follow_seeds
        BatchNormalization(synchronized=True) ──► Keras' own, then synchronised over strategy.training.combine_moments
        (a layer's weights)   ──► Layer.add_weight ─────► strategy.training.weight_added
        (their variables)     ──► Variable.__init__ ──► strategy.training.variable_created
        other.compile()       ──► Trainer.compile ────► an error, if other was not created in the scope
    strategy.run(step)
        model(x)              ──► Variable.__init__ ──► as above, for variables that the first call creates
        other.apply(…)        ──► Optimizer.apply ────► strategy.training.optimizer_created, if other is of no scope
        metric.update_state() ──► Variable.assign ────► strategy.training.metric_created, if metric is of no scope
        loss(…)               ──► means are divided by the number of replicas, as Keras does on TensorFlow

Objects of the scope stay patched: methods of the instance, not of its class, which are not saved with it. Each
passes Keras' own method to the strategy's ``Training``, which decides its data and callbacks.
"""

import functools
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

from choros.distribute.scope import assign_strategy, current_strategy, in_fit, in_replica, strategy_of
from choros.distribute.training import KerasCall, Training
from choros.errors import StrategyError
from choros.training.replaced import replaced
from choros.training.tf_context import as_one_replica
from choros.training.thread import doing, thread

_TRAINING_METHODS = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_lock = threading.Lock()
#: Those that all threads together have entered; the first one patches the classes, the last one restores them.
_blocks = 0
_restoring = ExitStack()


@contextmanager
def patch_keras(strategy: Any, *, in_run: bool = False) -> Iterator[None]:
    """The block in which Keras' classes notify ``strategy``; not every training is notified in ``run`` (``in_run``)."""
    training = strategy.training if "keras" in sys.modules else None
    if training is None or (in_run and not training.follows_run):
        yield
        return
    global _blocks
    with _lock:
        _blocks += 1
        if _blocks == 1:
            for kind, name, patch in _patches():
                own = vars(kind)[name]
                _restoring.callback(setattr, kind, name, own)
                setattr(kind, name, _patched(own, patch))
    try:
        training.follow_seeds()
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _restoring.close()


def _patched(own: Any, patch: Callable[..., Any]) -> Any:
    """Returns a function that calls ``patch`` with Keras' ``own`` and its arguments."""

    @functools.wraps(own)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return patch(own, *args, **kwargs)

    if patch is _synchronizing:  # of a layer, whose arguments Keras reads the names of
        patched.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    return patched


def _patches() -> list[tuple[Any, str, Callable[..., Any]]]:
    import keras

    from choros.training.keras_internals.fit import scales_of_losses
    from choros.training.keras_internals.models import (
        AnyVariable,
        BaseOptimizer,
        MultiOptimizer,
        Trainer,
        strategy_aware_classes,
    )

    loss_scale_optimizer = keras.optimizers.LossScaleOptimizer
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (AnyVariable, "__init__", _notifying(lambda training: training.variable_created)),
        (AnyVariable, "assign", _adopting),
        (Trainer, "__init__", _notifying(lambda training: training.model_created)),
        (BaseOptimizer, "__init__", _notifying(lambda training: training.optimizer_created)),
        (keras.Metric, "__init__", _notifying(lambda training: training.metric_created)),
        (keras.Metric, "add_variable", _within(functools.partial(doing, "creating_metric_variable"))),
        (keras.random.SeedGenerator, "__init__", _notifying(lambda training: training.follow_seeds)),
        (keras.Layer, "add_weight", _notifying_of_weights),
        (keras.layers.BatchNormalization, "__init__", _synchronizing),
        (Trainer, "compile", _checking_scope),
        # Keras does not see the strategy, with which it would train.
        *((kind, "__init__", _within(as_one_replica)) for kind in strategy_aware_classes()),
        (BaseOptimizer, "apply", _distributing),
        (MultiOptimizer, "apply", _distributing),
        (loss_scale_optimizer, "apply", _distributing),
        (loss_scale_optimizer, "stateless_apply", _distributing),
    ]
    if keras.backend.backend() == "tensorflow":
        patches.append((AnyVariable, "__init__", _outside_of_graphs))
    else:  # on TensorFlow Keras does it, for a strategy that TensorFlow knows
        patches += scales_of_losses(_over_replicas(operator.truediv), _over_replicas(operator.mul))
    if sys.modules.get("tensorflow") is not None:
        import tensorflow as tf

        patches += [
            (tf.train.Checkpoint, "__init__", _notifying()),
            (tf.train.CheckpointManager, "__init__", _notifying()),
        ]
    return patches


def _notifying(hook: Callable[[Training], Callable[[Any], None]] | None = None) -> Callable[..., None]:
    """Returns a patch of ``__init__`` that marks the new object as the strategy's, and calls a hook with it."""

    def patch(own: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        strategy = current_strategy()
        if strategy is None or strategy.training is None or strategy_of(self) is not None:
            return
        assign_strategy(self, strategy)
        if hook is not None:
            hook(strategy.training)(self)
        if isinstance(self, sys.modules["keras"].Model):
            for name in _TRAINING_METHODS:
                object.__setattr__(self, name, _delegating(strategy, self, name))

    return patch


def _notifying_of_weights(own: Any, /, *args: Any, **kwargs: Any) -> Any:
    weight = own(*args, **kwargs)
    strategy = current_strategy()
    if strategy is not None and strategy.training is not None:
        strategy.training.weight_added(weight)
    return weight


def _within(block: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    """Returns a patch of a method, which runs within the block."""

    def patch(own: Any, /, *args: Any, **kwargs: Any) -> Any:
        with block():
            return own(*args, **kwargs)

    return patch


def _over_replicas(scale: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Returns a patch that scales a loss by the number of replicas, whose gradients ``run`` adds."""

    def patch(own: Any, /, *args: Any) -> Any:
        loss, strategy = own(*args), current_strategy()
        if not in_replica() or not strategy.training.follows_run or strategy.num_replicas_in_sync == 1:
            return loss
        return scale(loss, strategy.num_replicas_in_sync)

    return patch


def _synchronizing(own: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    """The ``__init__`` of batch normalisation; Keras refuses ``synchronized=True`` but on TensorFlow."""
    strategy = current_strategy()
    if strategy is None or strategy.training is None or not kwargs.get("synchronized"):
        own(self, *args, **kwargs)
        return
    from choros.training.normalization import synchronize

    own(self, *args, **{**kwargs, "synchronized": False})
    self.synchronized = True
    synchronize(self, strategy.training.combine_moments)


def _outside_of_graphs(own: Any, self: Any, /, initializer: Any, *args: Any, **kwargs: Any) -> None:
    """Creates variables outside of the graph that a ``tf.function`` traces, so that the hook sees their values."""
    import tensorflow as tf

    in_graph = not tf.executing_eagerly() and not in_fit() and not tf.is_symbolic_tensor(initializer)
    with doing("creating_keras_variable"), tf.init_scope() if in_graph else nullcontext():
        own(self, initializer, *args, **kwargs)


def _is_of_no_scope(created: Any) -> bool:
    """Whether what a replica uses was created outside of all scopes, and is to become the strategy's."""
    return in_replica() and current_strategy().training.follows_run and strategy_of(created) is None


def _distributing(own: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``apply``: in a replica, an optimizer that was created outside of all scopes becomes the strategy's."""
    from choros.training.distributed_optimizer import reducer_of

    if _is_of_no_scope(self) and not thread.applying_optimizer and not reducer_of(self):
        strategy = current_strategy()
        assign_strategy(self, strategy)
        strategy.training.optimizer_created(self)
        return getattr(self, own.__name__)(*args, **kwargs)
    with doing("applying_optimizer"):
        return own(self, *args, **kwargs)


def _adopting(own: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """``assign``: in a replica, a metric that was created outside of all scopes becomes the strategy's."""
    if _is_of_no_scope(self) and self.synchronization == "on_read":
        from choros.training.keras_internals.models import in_stateless_scope

        if not in_stateless_scope():
            _adopt(self, current_strategy())
            return self.assign(*args, **kwargs)
    return own(self, *args, **kwargs)


def _adopt(variable: Any, strategy: Any) -> None:
    """Makes a variable that a replica assigns the strategy's, with all others of the metric that is updated."""
    from choros.training.keras_internals.models import overrides

    metric = _updated_metric(variable)
    if metric is None:
        assign_strategy(variable, strategy)
        strategy.training.variable_created(variable)
        return
    if overrides(metric, "update_state"):
        raise StrategyError(
            f"the metric {metric.name!r}, a {type(metric).__name__}, was created outside of the scope of this "
            f"{type(strategy).__name__}, which cannot know how its variables are combined: create it within `with "
            "strategy.scope():`."
        )
    for each in (metric, *metric.variables):
        assign_strategy(each, strategy)
    strategy.training.metric_created(metric)


def _updated_metric(variable: Any) -> Any:
    """The metric with this variable whose ``update_state`` calls this function, if any."""
    import keras

    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.Metric) and any(each is variable for each in caller.variables):
            return caller
        frame = frame.f_back
    return None


def _delegating(strategy: Any, model: Any, name: str) -> Any:
    """Returns a method that passes Keras' own to the training; overrides, as KerasHub's, run as they are."""
    import keras

    from choros.training.tensorboard import stand_in_for

    own = getattr(model, name)
    homes = [kind for kind in keras.Model.__mro__ if name in vars(kind)]
    home, of_keras = homes[0], vars(homes[0])[name]
    named = next((vars(kind)[name] for kind in homes if _names_arguments(vars(kind)[name])), of_keras).__get__(model)
    is_own = getattr(type(model), name) is of_keras
    prepares = name != "compile" and not is_own

    def delegate(method: Any, args: Any, kwargs: Any) -> Any:
        with strategy.scope():
            call = KerasCall(method, args, kwargs, named if is_own or prepares else None)
            if (given := call.get("callbacks")) is not None:  # TensorFlow may be missing to write TensorBoard's files
                call = call.replaced(callbacks=keras.tree.map_structure(stand_in_for, given))
            return getattr(strategy.training, name)(model, call)

    @functools.wraps(of_keras)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not model or in_fit():
            return of_keras(self, *args, **kwargs)
        return delegate(of_keras.__get__(model), args, kwargs)

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        if in_fit():
            return own(*args, **kwargs)  # fit calls evaluate for validation; a callback may call predict
        if not prepares:
            return delegate(own, args, kwargs)
        with replaced(home, **{name: inner}):
            return own(*args, **kwargs)

    return method


def _names_arguments(function: Any) -> bool:
    """Not what another library has put in the place of Keras' own, and takes all as ``*args``."""
    return all(each.kind is not each.VAR_POSITIONAL for each in inspect.signature(function).parameters.values())


def _checking_scope(own: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    strategy = current_strategy()
    if strategy is not None and strategy_of(self) is not strategy:
        raise StrategyError(
            f"the model {self.name!r} was created outside the scope of this {type(strategy).__name__}, so its fit "
            "would not be distributed: create it, and compile it, within `with strategy.scope():`."
        )
    return own(self, *args, **kwargs)
