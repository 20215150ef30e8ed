"""The reduction of gradients in TensorFlow's own loops and optimizers, by the reducer of Keras optimizers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, final

import keras
import tensorflow as tf

from choros.arrays import framework_adapter
from choros.comm import ProcessSet, Reduction, global_process_set, joining
from choros.errors import ConfigError
from choros.parallel import ops
from choros.parallel.compression import Compressor
from choros.parallel.reduce.plan import ReduceConfig, check_predivision, indices_of_groups
from choros.parallel.reduce.reducer import GradientReducer
from choros.parallel.structure import with_items
from choros.settings import current
from choros.tensorflow.collectives import in_session_graph, scalar
from choros.training.device import placed
from choros.training.optimizer_reducer import OptimizerReducer
from choros.training.variables import value_of

_ADVICE = (
    "Start all ranks from the same values: call broadcast_variables(model.variables, root_rank=0), and with the "
    "optimizer's variables, before training or after its first step. A variable that is to differ between ranks is "
    "registered with tape.register_local_source(variable)."
)
#: Loops broadcast after their first step, for which they may have accumulated gradients many times.
_COMPARED_STEP = 100
#: By their arguments, what reduces the gradients of all tapes that have these.
_reducers: dict[Any, OptimizerReducer] = {}


def reduction_of(
    *,
    op: Reduction,
    compression: Compressor,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    groups: int | Sequence[Sequence[Any]],
    process_set: ProcessSet,
    scale_local_gradients: bool,
) -> TapeReduction | AdasumReduction:
    """Returns how a tape, or an optimizer of TensorFlow 1, reduces gradients; a ``ConfigError`` for invalid arguments.
    The arguments are Horovod's; ``groups``: a number, 0: none, or lists of sources.
    """
    process_set.check_registered("the distributed tape or optimizer")
    if keras.backend.backend() != "tensorflow":
        raise ConfigError(
            f"distributed tapes and optimizers of TensorFlow need Keras on TensorFlow, but Keras uses "
            f"{keras.backend.backend()}: set KERAS_BACKEND=tensorflow before the script starts."
        )
    indices_of_groups(groups if isinstance(groups, int) else 0, (), "source")
    if Reduction(op) is Reduction.ADASUM:
        check_predivision(gradient_predivide_factor, Reduction.ADASUM)
        return AdasumReduction(compression, sparse_as_dense, process_set)
    config = ReduceConfig(
        op=op,
        compressor=compression,
        predivide_factor=gradient_predivide_factor,
        compared_step=min(_COMPARED_STEP, max(2, current().compare_every or _COMPARED_STEP)),
        process_set=process_set,
    )
    return TapeReduction(config, groups, sparse_as_dense, scale_local_gradients)


def join() -> Any:
    """Participates in the collectives of the other ranks until all ranks have joined (Horovod's ``join``).

    A rank calls it when it has no more batches. It gives zeros to the others' reductions: gradients of tapes are then
    averaged over the ranks that still have batches, and ``allreduce`` over all ranks, as in Horovod. It does not update
    its variables: broadcast them from the rank that is returned.

    Returns:
        The rank that was the last to join, the same on every rank, as an int32 scalar.

    Raises:
        MismatchError: on all ranks, if the others broadcast from a rank that has joined or gather weights, or if this
            rank has never computed the gradients that they compress by ``Compression.power_sgd``.

    Example:
        >>> import choros.tensorflow as hvd
        >>> hvd.init()
        >>> int(hvd.join())
        0
    """
    return scalar(_join_all, None)


def _join_all() -> int:
    communicator = global_process_set.communicator
    parts: dict[Any, Any] = {}
    for each in _reducers.values():
        reducer = each.reducer
        # Before its first step a rank does not know the gradients of the others: they explain them.
        if reducer.process_set is global_process_set and reducer.share is not None:
            parts |= reducer.participation(())
    learn = functools.partial(GradientReducer.learned, process_set=global_process_set, configure=placed)
    joining.join(communicator, parts, learn)
    return joining.last_to_join(communicator)


@final
class TapeReduction:
    """Averages or sums gradients, by the reducer of all optimizers; the arguments are those of ``reduction_of``.
    ``local``: the sources whose gradients stay on this rank.
    """

    def __init__(
        self,
        config: ReduceConfig,
        groups: int | Sequence[Sequence[Any]],
        sparse_as_dense: bool,
        scale_local: bool,
    ) -> None:
        self._config = config
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self._scale_local = scale_local
        self.local: list[Any] = []

    def add_local(self, source: Any) -> None:
        """Keeps the gradient of ``source`` on this rank."""
        self.local.append(source)

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any], examples: Any = None) -> list[Any]:
        """Returns the ranks' gradients, averaged, weighted by ``examples``, or summed; ``None`` for ``None``."""
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if not given:
            return list(gradients)
        own, trained = [gradients[index] for index in given], [sources[index] for index in given]
        reducer = self._reducer(trained)

        def forward(arrays: Sequence[Any]) -> list[Any]:
            return reducer.reduce(arrays, trained, sources, examples=examples)

        def backward(upstream: Sequence[Any]) -> list[Any]:
            if examples is None:
                return forward(upstream)  # with the same weight on all ranks, a mean is its own adjoint
            raise ConfigError(
                "gradients that are averaged over examples have no gradient themselves: use the tape's own gradient() "
                "for those that the loss depends on, or leave out examples=…."
            )

        if reducer.active and not any(isinstance(each, tf.IndexedSlices) for each in own):
            reduced = framework_adapter("tensorflow").with_gradient(forward, backward, own)
        else:
            reduced = forward(own)
        variables = [source for source in trained if hasattr(source, "assign")]
        if not in_session_graph():  # it would not run by itself
            reducer.compare(variables, list(map(value_of, variables)))
        return with_items(gradients, given, reduced)

    def _reducer(self, trained: Sequence[Any]) -> OptimizerReducer:
        """What reduces the gradients of ``trained``: the same for all tapes with these arguments."""
        config = self._config
        if self._groups:
            config = dataclasses.replace(config, groups=self._indices_of_groups(trained))
        key = (config, self._sparse_as_dense, self._scale_local, tuple(map(id, self.local)))
        if key not in _reducers:
            reducer = OptimizerReducer(
                lambda: placed(config),
                scale_local_gradients=self._scale_local,
                sparse_as_dense=self._sparse_as_dense,
                advice=_ADVICE,
            )
            reducer.local += self.local  # which it keeps, so that no other one gets its id
            _reducers[key] = reducer
        return _reducers[key]

    def _indices_of_groups(self, trained: Sequence[Any]) -> int | tuple[tuple[int, ...], ...] | None:
        local = {id(source) for source in self.local}
        shared = [source for source in trained if id(source) not in local]
        if isinstance(self._groups, int):
            return self._groups
        known = {id(source) for source in shared}
        present = [[source for source in group if id(source) in known] for group in self._groups]
        return indices_of_groups(present, shared, "source")


@final
class AdasumReduction:
    """Combines gradients by Adasum (``comm/adasum.py``), each for itself; the arguments are as above."""

    local = ()

    def __init__(self, compression: Compressor, sparse_as_dense: bool, process_set: ProcessSet) -> None:
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set

    def add_local(self, source: Any) -> None:
        """Raises an error."""
        del source
        raise ConfigError(
            "op=Adasum combines all gradients of a tape: compute those of local variables by another one."
        )

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any], examples: Any = None) -> list[Any]:
        """See ``TapeReduction.reduce``."""
        del sources
        if examples is not None:
            raise ConfigError("op=Adasum does not weight gradients: leave out examples=….")
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        own = [gradients[index] for index in given]
        if not self._sparse_as_dense and any(isinstance(each, tf.IndexedSlices) for each in own):
            raise ConfigError(
                "op=Adasum cannot combine sparse gradients (tf.IndexedSlices): pass sparse_as_dense=True."
            )
        if not given or not self._process_set.included():
            return list(gradients)
        combined = ops.grouped_allreduce(
            list(map(tf.convert_to_tensor, own)),
            Reduction.ADASUM,
            compression=self._compression,
            process_set=self._process_set,
        )
        return with_items(gradients, given, combined)
