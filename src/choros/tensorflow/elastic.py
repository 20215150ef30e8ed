"""Horovod's elastic API for TensorFlow.

::

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, batches):
            step(…)
            if state.batch % 10 == 0:
                state.commit()

    train(state)
"""

from collections.abc import Sequence
from typing import Any

from choros.elastic.retry import run
from choros.elastic.state import ObjectState, State
from choros.errors import ConfigError, HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError
from choros.tensorflow.collectives import in_session_graph
from choros.training.elastic_state import KerasState, VariablesState
from choros.training.variables import OF_SLICE

__all__ = [
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]


class TensorFlowKerasState(KerasState):
    """The state of a Keras model and its optimizer, as in ``choros.keras.elastic.KerasState``.

    Args:
        model: a built model.
        optimizer: its optimizer, if it is not compiled into the model.
        backend: Horovod's; has no effect.
        kwargs: further objects, such as ``batch=0``.

    Raises:
        ConfigError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(VariablesState):
    """The state of a list of variables.

    Args:
        variables: TensorFlow's or Keras' variables, the same list on every rank.
        session: Horovod's, of TensorFlow 1; has no effect.
        kwargs: further objects, such as ``batch=0``.

    Raises:
        ConfigError: there are no variables; in eager code TensorFlow has no list of all. Or some are those of an
            optimizer with ``shard_state=True``, of which each rank has its own; or of a graph of TensorFlow 1.

    Example:
        >>> import tensorflow as tf, choros.tensorflow as hvd
        >>> hvd.init()
        >>> state = hvd.elastic.TensorFlowState([tf.Variable(1.0)], batch=0)
        >>> state.commit()
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        del session
        if in_session_graph():
            raise ConfigError(
                "a graph of TensorFlow 1 has no elastic state: build TensorFlowState(variables) in eager code, without "
                "tf.compat.v1.disable_eager_execution(), disable_v2_behavior() and tf.Graph(). A script with sessions "
                "goes on from a checkpoint that it loads, when chorosrun starts it again."
            )
        if not variables:
            raise ConfigError("TensorFlowState needs the variables, such as model.variables: eager code has no others.")
        if any(hasattr(variable, OF_SLICE) for variable in variables):
            raise ConfigError(
                "TensorFlowState was given variables of an optimizer with shard_state=True, of which each rank has its "
                "own slices: use TensorFlowKerasState(model, optimizer), or leave shard_state out."
            )
        self.variables = list(variables)
        super().__init__(**kwargs)

    def tracked(self) -> Sequence[Any]:
        """Returns the variables."""
        return self.variables
