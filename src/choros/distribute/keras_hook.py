"""How plain ``model.fit`` is reached: the one module that touches Keras' classes.

While a scope is open, four classes of Keras have their ``__init__`` watched, and ``compile`` looks who calls it; on
leaving the last scope all are as they were::

    with strategy.scope():
        model = Sequential(…) ──► Trainer.__init__ ───► this model's fit, evaluate, … now ask strategy.training
        Adam()                ──► Optimizer.__init__ ─► strategy.training.optimizer_made
        Accuracy()            ──► Metric.__init__ ────► strategy.training.metric_made
        (their variables)     ──► Variable.__init__ ──► strategy.training.variable_made
        other.compile()       ──► Trainer.compile ────► an error, if other was not made in the scope

What stays is on the objects that were made in the scope: methods of that one model, of the instance and not of its
class, which are not saved with it. Each hands Keras' own method to the strategy's ``Training``, which decides with what
data and which callbacks it is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from choros.distribute.fit.call import Call
from choros.distribute.fit.training import Training
from choros.distribute.scope import current_strategy, in_fit
from choros.errors import StrategyError

__all__ = ["catching", "strategy_of"]

_ATTRIBUTE = "_choros_strategy"
_LED = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_WRITING = ("save", "save_weights", "export")

_depth = 0


class TrainingStrategy(Protocol):
    """What this module asks of a strategy, which is made of it."""

    @property
    def training(self) -> Training | None:
        """What models that are made in the scope do when they are trained."""

    def scope(self) -> AbstractContextManager[Any]:
        """The block in which the program is in the strategy's scope."""


def strategy_of(made: Any) -> TrainingStrategy | None:
    """The strategy in whose scope a model, an optimizer or a Keras variable was made."""
    return getattr(made, "__dict__", {}).get(_ATTRIBUTE)


@contextmanager
def catching(strategy: TrainingStrategy) -> Iterator[None]:
    """The block in which what Keras makes is made for ``strategy``."""
    global _depth
    if "keras" not in sys.modules or strategy.training is None:
        yield
        return
    _depth += 1
    with ExitStack() as stack:
        if _depth == 1:
            stack.enter_context(_watched())
        try:
            yield
        finally:
            _depth -= 1


@contextmanager
def _watched() -> Iterator[None]:
    import keras

    from choros.training.keras_internals import AnyVariable, BaseOptimizer, Trainer

    watched = [
        (AnyVariable, "__init__", _then(lambda training: training.variable_made)),
        (Trainer, "__init__", _then(lambda training: training.model_made)),
        (BaseOptimizer, "__init__", _then(lambda training: training.optimizer_made)),
        (keras.Metric, "__init__", _then(lambda training: training.metric_made)),
        (Trainer, "compile", _refusing_strangers),
    ]
    if sys.modules.get("tensorflow") is not None:
        import tensorflow as tf

        watched += [
            (tf.train.Checkpoint, "__init__", _then(lambda training: training.checkpoint_made)),
            (tf.train.CheckpointManager, "__init__", _then(lambda training: training.checkpoint_manager_made)),
        ]
    kept = [(kind, name, kind.__dict__[name]) for kind, name, _ in watched]
    for kind, name, wrapped in watched:
        setattr(kind, name, wrapped(kind.__dict__[name]))
    try:
        yield
    finally:
        for kind, name, own in kept:
            setattr(kind, name, own)


def _then(told: Callable[[Training], Callable[[Any], None]]) -> Callable[[Any], Any]:
    """Makes of an ``__init__`` one after which the strategy in scope is told of the new object."""

    import keras

    def wrapping(own: Any) -> Any:
        @functools.wraps(own)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            strategy = current_strategy()
            if strategy is None or strategy.training is None or strategy_of(self) is not None:
                return
            # Past Keras' attribute tracking: this is no part of it.
            object.__setattr__(self, _ATTRIBUTE, strategy)
            told(strategy.training)(self)
            if isinstance(self, keras.Model):
                _lead(self, strategy)

        return init

    return wrapping


def _lead(model: Any, strategy: TrainingStrategy) -> None:
    """Has this model's methods ask the strategy."""
    for name in (*_LED, *_WRITING):
        object.__setattr__(model, name, _asking(strategy, model, name))


def _asking(strategy: TrainingStrategy, model: Any, name: str) -> Any:
    own = getattr(model, name)

    @functools.wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        if in_fit() and name not in _WRITING:
            return own(*args, **kwargs)  # fit validates with evaluate; a callback predicts something by itself
        lead = getattr(strategy.training, name)
        if name in _WRITING:
            return lead(model, Call(own, args, kwargs))
        with strategy.scope():
            return lead(model, _with_callbacks_that_work(Call(own, args, kwargs)))

    return method


def _with_callbacks_that_work(call: Call) -> Call:
    """The call with Keras' TensorBoard callback exchanged where TensorFlow is not there to write its files."""
    given = call.get("callbacks")
    if not isinstance(given, (list, tuple)):
        given = [] if given is None else [given]
    from choros.training.tensorboard import stand_in_for

    exchanged = [stand_in_for(each) for each in given]
    unchanged = all(new is old for new, old in zip(exchanged, given, strict=True))
    return call if unchanged else call.replaced(callbacks=exchanged)


def _refusing_strangers(own: Any) -> Any:
    @functools.wraps(own)
    def compile_if_ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = current_strategy()
        if strategy is not None and strategy_of(self) is not strategy:
            raise StrategyError(
                f"the model {self.name!r} was made outside of the scope of this {type(strategy).__name__}, so its fit "
                "would not be distributed: make it, and compile it, within `with strategy.scope():`."
            )
        return own(self, *args, **kwargs)

    return compile_if_ours
