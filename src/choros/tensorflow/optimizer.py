"""Horovod's ``DistributedOptimizer``: of Keras' optimizers, and of those of TensorFlow 1."""

from collections.abc import Callable, Sequence
from typing import Any, final

import keras
import tensorflow as tf

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel.arguments import REDUCTION_ARGUMENTS, documented
from choros.parallel.compression import Compression, Compressor
from choros.tensorflow.aggregation import LocalGradientAggregationHelper
from choros.tensorflow.collectives import unconverted
from choros.tensorflow.reduction import AdasumReduction, TapeReduction, reduction_of
from choros.training import horovod_optimizer

_LegacyOptimizer: Any = tf.compat.v1.train.Optimizer


@unconverted
@documented(
    **{
        **REDUCTION_ARGUMENTS,
        "optimizer": "a Keras optimizer, which is changed in place and reduces in ``apply_gradients``; or one of "
        "``tf.compat.v1.train``, for which another one is returned, that reduces in ``compute_gradients``.",
        "name": "that of the optimizer of TensorFlow 1; a Keras optimizer keeps its own.",
        "use_locking": "as in TensorFlow 1; a Keras optimizer has no locks.",
        "op": "``Average`` or ``Sum``; with an optimizer of TensorFlow 1 also ``Adasum``, which combines the ranks' "
        "updates and not their gradients.",
    }
)
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Reduction = Reduction.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    shard_state: bool | None = None,
) -> Any:
    """Makes an optimizer average gradients over all ranks.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument has an invalid value; ``shard_state`` is given with an optimizer of TensorFlow 1.

    Example:
        >>> import keras, choros.tensorflow as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
    """
    given = dict(locals())
    if isinstance(optimizer, keras.optimizers.Optimizer):
        del given["use_locking"]
        return horovod_optimizer.DistributedOptimizer(**given)
    if shard_state:
        raise ConfigError(
            "shard_state=True needs a Keras optimizer, such as keras.optimizers.Adam(): see docs/shard-state.md."
        )
    return _of_tensorflow_1(optimizer, given)


def _of_tensorflow_1(optimizer: Any, given: dict[str, Any]) -> Any:
    if not isinstance(optimizer, _LegacyOptimizer):
        raise ConfigError(
            f"DistributedOptimizer takes a Keras optimizer or one of tf.compat.v1.train, not a "
            f"{type(optimizer).__name__}: create one, such as keras.optimizers.Adam(), and pass it."
        )
    named = given["name"] or f"Distributed{type(optimizer).__name__}"
    common = {key: given[key] for key in ("sparse_as_dense", "process_set", "scale_local_gradients")}
    reducing = {key: given[key] for key in ("op", "compression", "gradient_predivide_factor")}
    groups = given["num_groups"] if given["groups"] is None else given["groups"]
    reduction = reduction_of(**common, **reducing, groups=groups)
    aggregation = None
    if given["backward_passes_per_step"] != 1:
        if isinstance(reduction, AdasumReduction):
            raise ConfigError("op=Adasum with an optimizer of TensorFlow 1 needs backward_passes_per_step=1.")
        accumulated = {key: given[key] for key in ("backward_passes_per_step", "average_aggregated_gradients")}
        aggregation = LocalGradientAggregationHelper(
            allreduce_func=reduction.reduce, rank=0, optimizer_type="", name=named, **common, **accumulated
        )
    return _DistributedLegacyOptimizer(optimizer, reduction, aggregation, named, given["use_locking"])


@final
class _DistributedLegacyOptimizer(_LegacyOptimizer):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 for which another one makes the updates: of reduced gradients; with Adasum, ranks
    combine what these have added to the variables.
    """

    def __init__(
        self,
        optimizer: Any,
        reduction: TapeReduction | AdasumReduction,
        aggregation: LocalGradientAggregationHelper | None,
        name: str,
        use_locking: bool,
    ) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._reduction = reduction
        self._aggregation = aggregation

    def register_local_var(self, var: Any) -> None:
        if self._aggregation is None:
            self._reduction.add_local(var)
        else:
            self._aggregation.register_local_var(var)

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Returns the reduced gradients, with their variables."""
        pairs = list(self._optimizer.compute_gradients(*args, **kwargs))
        if isinstance(self._reduction, AdasumReduction):
            return pairs
        gradients, variables = zip(*pairs, strict=True)
        reduce = self._reduction.reduce if self._aggregation is None else self._aggregation.compute_gradients
        return list(zip(reduce(gradients, variables), variables, strict=True))

    @unconverted
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        pairs = list(grads_and_vars)

        def apply() -> Any:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)

        if isinstance(self._reduction, AdasumReduction):
            return _combine_changes(
                self._reduction, [variable for gradient, variable in pairs if gradient is not None], apply
            )
        if self._aggregation is None:
            return apply()
        return self._aggregation.apply_gradients(apply, self._optimizer, pairs, global_step=global_step)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self) -> Any:
        return self._optimizer.variables()


def _combine_changes(reduction: AdasumReduction, variables: list[Any], apply: Callable[[], Any]) -> Any:
    starts = [tf.identity(variable) for variable in variables]
    with tf.control_dependencies(starts):
        update = apply()
    with tf.control_dependencies([] if update is None else [update]):
        added = [tf.identity(variable) - start for variable, start in zip(variables, starts, strict=True)]
    combined = reduction.reduce(added, variables)
    triples = zip(variables, starts, combined, strict=True)
    return tf.group(*(variable.assign(start + each) for variable, start, each in triples))
