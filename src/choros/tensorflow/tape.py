"""Horovod's gradient tapes: TensorFlow's own, whose ``gradient`` returns the ranks' average.

::

    with tf.GradientTape() as tape: …
    tape = DistributedGradientTape(tape)
    tape.gradient(loss, sources) ─► TensorFlow's gradients ─► Reduction.reduce ─► those of all ranks
                                                                                        │
    optimizer.apply_gradients  ◄────────────────────────────────────────────────────────┘

A loop makes a new tape for each step, but what reduces their gradients lasts: it is created once for all tapes
that have the same arguments (``reduction.py``).
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from choros.comm import ProcessSet, Reduction, global_process_set
from choros.errors import ConfigError
from choros.parallel.arguments import REDUCTION_ARGUMENTS, documented
from choros.parallel.compression import Compression, Compressor
from choros.tensorflow.collectives import unconverted
from choros.tensorflow.reduction import AdasumReduction, TapeReduction, reduction_of
from choros.training.horovod_optimizer import local_variables
from choros.training.replaced import derived


class _DistributedTape:
    """What a distributed tape has before the methods of its own class."""

    # A slot, and no attribute: tapes made from one tape share its attributes.
    __slots__ = ("_choros_reduction",)
    _choros_reduction: TapeReduction | AdasumReduction

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        *,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        examples: Any = None,
    ) -> Any:
        """Returns the gradients of ``target``, over all ranks; ``None`` where it does not depend on the source.
        ``examples``: of these, ``target`` is this rank's mean; the average is then over all ranks' examples. 0: this
        rank's count nothing; ``None``: equal weights, as in Horovod. ``use_generic_names`` has no effect.
        """
        del use_generic_names
        own: Any = super()
        gradients = own.gradient(target, sources, output_gradients, unconnected_gradients)
        reduced = self._choros_reduction.reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources), examples)
        return tf.nest.pack_sequence_as(gradients, reduced)

    @unconverted
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns pairs (source, gradient): for the local sources, and for those of all ranks; see ``gradient``."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names, **options)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = {id(source) for source in self._choros_reduction.local}
        return [pair for pair in pairs if id(pair[0]) in local], [pair for pair in pairs if id(pair[0]) not in local]

    def register_local_source(self, source: Any) -> None:
        """Keeps the gradient of ``source`` on this rank; it is divided by the number of ranks, if so configured."""
        self._choros_reduction.add_local(source)


_ARGUMENTS = {
    **REDUCTION_ARGUMENTS,
    "gradtape": "a ``tf.GradientTape``, which may have recorded already; persistent or not. Its own ``gradient`` "
    "remains that of this rank.",
    "op": "``Average``, ``Sum`` or ``Adasum``.",
}


@documented(**_ARGUMENTS)
def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: Reduction = Reduction.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns ``gradtape`` as a tape whose ``gradient`` averages over all ranks; eager and in a ``tf.function``.

    Ranks have the same weight, because a tape does not know the number of examples of a loss: with batches of different
    sizes, pass it, as ``tape.gradient(loss, sources, examples=len(x))``.

    After each 100 steps ranks compare the variables that they have trained.

    Raises:
        NotInitializedError: before ``init()``.
        ConfigError: an argument has an invalid value.

    Example:
        >>> import tensorflow as tf, choros.tensorflow as hvd
        >>> hvd.init()
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight**2
        >>> float(hvd.DistributedGradientTape(tape).gradient(loss, weight))
        6.0
    """
    del device_dense, device_sparse
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedTape):
        raise ConfigError(
            f"DistributedGradientTape takes a tf.GradientTape that is not distributed yet, not a "
            f"{type(gradtape).__name__}: create one, and pass it."
        )
    tape: Any = object.__new__(derived(type(gradtape), _DistributedTape))
    tape.__dict__ = gradtape.__dict__  # what one of them records, or has used up, the other one has, too
    tape._choros_reduction = reduction_of(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return tape


@unconverted
@documented(**_ARGUMENTS)
def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: Reduction = Reduction.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """``DistributedGradientTape`` for a model of which each rank has some layers of its own."""
    arguments = dict(locals())
    local = local_variables(arguments.pop("local_layers"))
    tape = DistributedGradientTape(**arguments)
    for variable in local:
        tape.register_local_source(variable)
    return tape
