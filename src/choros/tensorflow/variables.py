"""Broadcasts of variables from one rank to the others: eager, in a ``tf.function`` and in a graph of TensorFlow 1."""

from collections.abc import Sequence
from typing import Any, final

import tensorflow as tf

from choros.comm import ProcessSet, global_process_set
from choros.errors import GraphRequiredError
from choros.tensorflow.collectives import in_session_graph, unconverted
from choros.training.variables import broadcast_updates


@unconverted
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrites every rank's ``variables`` with those of ``root_rank``; in a ``tf.function`` in each of its runs.

    Args:
        variables: TensorFlow's or Keras' (``model.variables``, ``optimizer.variables``), the same list on every rank.
        root_rank: a global rank.
        process_set: the participating ranks.
        inplace: Horovod's; has no effect.

    Returns:
        In a graph of TensorFlow 1, the operation to run; elsewhere ``None``.

    Raises:
        MismatchError: ranks have different variables; the message shows the first that differs.

    Example:
        >>> import tensorflow as tf, choros.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_variables([tf.Variable(1.0)], root_rank=0)
    """
    del inplace
    updates = broadcast_updates(variables, root_rank, process_set)
    return tf.group(*updates) if in_session_graph() else None


@unconverted
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """``broadcast_variables`` that returns their new values.

    Args:
        variables: as for ``broadcast_variables``.
        root_rank: likewise.
        name: Horovod's; has no effect.
        process_set: likewise.
    """
    del name
    update = broadcast_variables(variables, root_rank, process_set)
    with tf.control_dependencies([] if update is None else [update]):
        return [tf.identity(variable) for variable in variables]


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that broadcasts all variables of the current graph, of TensorFlow 1.

    Args:
        root_rank: a global rank.

    Raises:
        GraphRequiredError: called eagerly, where TensorFlow has no list of all variables.
    """
    if tf.executing_eagerly():
        raise GraphRequiredError(
            "broadcast_global_variables() broadcasts the variables of a TensorFlow 1 graph: in eager code use "
            "broadcast_variables(model.variables, root_rank), and broadcast_variables(optimizer.variables, root_rank)."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


@final
class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc, unused-ignore]
    """Broadcasts all variables of the graph when a ``tf.compat.v1.train.MonitoredSession`` is created.

    Args:
        root_rank: a global rank.
        device: Horovod's; has no effect.

    Example::

        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            ...
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        del device
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the broadcast to the graph; TensorFlow calls it before the graph is finalised."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it, after variables are initialised or restored."""
        del coord
        session.run(self.bcast_op)
