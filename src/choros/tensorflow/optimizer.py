"""Horovod's ``DistributedOptimizer``: of Keras' optimizers, and of those of TensorFlow 1, which cannot accumulate the
gradients of several backward passes themselves::

    backward pass      1          2          3          n = 3
    compute_gradients  sum = g1   sum += g2  sum += g3  ─► reduced over the ranks; sum = 0, counter = 0
    counter            1          2          0
    apply_gradients    nothing    nothing    the update
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import keras
import tensorflow as tf

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel.arguments import REDUCTION_ARGUMENTS, documented
from choros.parallel.compression import Compression, Compressor
from choros.parallel.reduce.plan import check_passes
from choros.parallel.structure import with_items
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


class LocalGradientAggregationHelper:
    """Sums the gradients of several backward passes on this rank, and reduces the sums over the ranks.

    Eager, in a ``tf.function`` and in a graph of TensorFlow 1, where its variables are local ones
    (``tf.compat.v1.local_variables_initializer``).

    Args:
        backward_passes_per_step: the number of backward passes for each update.
        allreduce_func: reduces a list of gradients over the ranks: ``allreduce_func(gradients, variables)``.
        sparse_as_dense: whether sparse gradients are made dense; otherwise they are an error.
        average_aggregated_gradients: whether gradients of several passes are averaged, not summed.
        rank: Horovod's; has no effect.
        optimizer_type: Horovod's; likewise.
        process_set: the ranks that ``allreduce_func`` reduces over.
        scale_local_gradients: whether gradients of ``register_local_var`` are divided by the number of ranks.
        name: that of its variables.

    Raises:
        ConfigError: ``backward_passes_per_step`` is less than 1.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Any], list[Any]], Sequence[Any]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: str,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        del rank, optimizer_type
        check_passes(backward_passes_per_step)
        self.backward_passes_per_step = backward_passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.name = name
        self.counter: Any = None
        self.locally_aggregated_grads: list[Any] = []
        self._allreduce = allreduce_func
        self._local: list[Any] = []

    def register_local_var(self, var: Any) -> None:
        """Keeps the gradient of ``var`` on its rank."""
        self._local.append(var)

    @unconverted
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:  # noqa: A002 (Horovod's name)
        """Adds the gradients of a backward pass; returns what ``apply_gradients`` is to be given.

        Args:
            grads: the gradients of this rank; ``None`` for a variable without one, in all passes.
            vars: the variables they belong to.

        Returns:
            After the last pass of a step the reduced gradients, otherwise those of this pass.
        """
        given = [index for index, gradient in enumerate(grads) if gradient is not None]
        own, trained = [self._dense(grads[index]) for index in given], [vars[index] for index in given]
        if self.counter is None:
            self._create(own, trained)
        sums = self.locally_aggregated_grads
        with tf.control_dependencies([total.assign_add(each) for total, each in zip(sums, own, strict=True)]):
            passes = self.counter.assign_add(1)
        last = tf.equal(passes, self.backward_passes_per_step)
        with tf.control_dependencies([last]):
            reduced = tf.cond(
                last,
                lambda: self._reduce(list(map(tf.identity, sums)), trained),
                lambda: list(map(tf.identity, own)),
            )
        with tf.control_dependencies(reduced):
            cleared = tf.cond(last, self._clear, lambda: tf.constant(0))
        results: list[Any] = list(grads)
        with tf.control_dependencies([cleared]):
            for index, gradient in zip(given, reduced, strict=True):
                results[index] = tf.ensure_shape(gradient, vars[index].shape)
        return results

    @unconverted
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Updates the variables after the last pass of a step, and does nothing after the others.

        Args:
            apply_grads_closure: makes the update.
            optimizer: the optimizer; its ``iterations``, if it has any, count every pass.
            *args: the first one is what ``compute_gradients`` has returned, with the variables.
            **kwargs: ``global_step``, if given, counts every pass.

        Returns:
            In a graph of TensorFlow 1, the operation to run.
        """
        counted = [getattr(optimizer, "iterations", None), kwargs.get("global_step")]

        def update() -> Any:
            operation = apply_grads_closure()
            with tf.control_dependencies([] if operation is None else [operation]):
                return tf.constant(True)

        def count() -> Any:
            with tf.control_dependencies([each.assign_add(1) for each in counted if each is not None]):
                return tf.constant(False)

        with tf.control_dependencies([gradient for gradient, _ in args[0] if gradient is not None]):
            passes = self.counter.read_value()
        return tf.group(tf.cond(tf.equal(passes, 0), update, count))

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ConfigError(
                "gradients of several backward passes cannot be summed if they are sparse (tf.IndexedSlices): pass "
                "sparse_as_dense=True."
            )
        return tf.convert_to_tensor(gradient)

    def _create(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Creates the counter and the sums: once, outside of a function that is being traced."""
        with tf.init_scope():
            local = [] if tf.executing_eagerly() else [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]

            def variable(initial: Any, name: str) -> Any:
                return tf.compat.v1.Variable(
                    initial,
                    trainable=False,
                    name=f"{self.name}aggregation_{name}",
                    collections=local,
                    use_resource=True,
                )

            self.counter = variable(tf.zeros([], tf.int32), "counter")
            self.locally_aggregated_grads = [
                variable(tf.zeros(trained.shape, gradient.dtype), str(index))
                for index, (gradient, trained) in enumerate(zip(gradients, variables, strict=True))
            ]

    def _clear(self) -> Any:
        with tf.control_dependencies([total.assign(tf.zeros_like(total)) for total in self.locally_aggregated_grads]):
            return tf.identity(self.counter.assign(0))

    def _reduce(self, totals: list[Any], variables: Sequence[Any]) -> list[Any]:
        local = {id(variable) for variable in self._local}
        shared = [index for index, variable in enumerate(variables) if id(variable) not in local]
        reduced = self._allreduce([totals[index] for index in shared], [variables[index] for index in shared])
        factor = 1 / (self.process_set.size() or 1) if self.scale_local_gradients else 1.0
        results = with_items([total * tf.cast(factor, total.dtype) for total in totals], shared, reduced)
        if self.average_aggregated_gradients:
            results = [each / self.backward_passes_per_step for each in results]
        return results


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
