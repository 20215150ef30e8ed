"""The slices of an optimizer's state, and of the variables that it trains, that this rank has. A slice variable stands
for the items of a variable in one slice while Keras updates these. Optimizers that work item by item have even slices;
others have whole variables, which are their own slice variables. A step: see ``sliced_optimizer.py``.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import keras
import numpy as np

from choros.arrays import ArraySpec
from choros.comm import Array, ProcessSet, Reduction, global_process_set, on_change
from choros.comm.primitives import Change
from choros.errors import ConfigError
from choros.parallel.ops import allreduce
from choros.parallel.reduce.gradients import GradientKind, Ranges
from choros.parallel.reduce.slices import Holders, even_slices, gather_slices, whole_slices
from choros.training.host_gradients import dtype_of, is_embedding, is_overwritten, keras_arrays, scaled
from choros.training.keras_internals import slice_variables
from choros.training.keras_internals.models import NEED_ALL, NEED_VARIABLES, MultiOptimizer, apply_count, innermost

#: Keras' optimizers that update each item by its own gradient and state.
_BY_ITEM = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
#: The gradient of a variable of which this rank has no items.
ELSEWHERE: Any = object()
#: The items of a variable, by its index, that are in the slice with this number.
Piece: TypeAlias = tuple[int, int]
#: In place of that number: each rank trains the variable alone.
ALONE = -1


@final
class Slices:
    """The slices of the variables that an optimizer trains, among the ranks of a process set: this one has its own, and
    in an elastic job the copy of another one.

    Attributes:
        variables: all variables, in the optimizer's order.
        holders: which ranks have which slices.
        own: by their pieces, the slice variables that this rank has.
        ranges: by their indices, the items in each slice of the variables that are divided.
        by_item: whether variables are cut.
        is_inside: whether the optimizer is in another one, as in LossScaleOptimizer.
        receives_whole: whether each rank receives whole gradients, as it has two slices.
        is_new: whether others had not taken this rank in: it has none of the state of what they train.
        is_replaced: whether slices were cut anew since.
        seen: the members in the last update, which all have seen together.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], process_set: ProcessSet, local: Sequence[Any]) -> None:
        """``local`` variables are trained by each rank alone, and are their own slice variables."""
        communicator = process_set.communicator
        self.variables = list(variables)
        self.process_set = process_set
        self.rank = communicator.rank
        self.holders = Holders.now(communicator)
        self.held = self.holders.slices_of(communicator.launched[communicator.rank])
        self.receives_whole = communicator.elastic
        self.is_replaced = False
        self.seen = self.holders.members
        self._present = communicator.launched
        self.is_new = communicator.is_new
        if self.receives_whole and process_set is global_process_set:
            on_change(self._on_change)
        self.by_item = works_by_item(optimizer)
        self.is_inside = innermost(optimizer) is not optimizer
        self._indices = {id(variable): index for index, variable in enumerate(variables)}
        alone = {id(each) for each in (*local, *filter(is_overwritten, variables))}
        shared = [index for index, variable in enumerate(variables) if id(variable) not in alone]
        self.ranges: dict[int, Ranges] = dict(zip(shared, self._divided(shared), strict=True))
        self.own: dict[Piece, Any] = {}
        for index, variable in enumerate(variables):
            if index not in self.ranges:
                self.own[index, ALONE] = variable
                continue
            for number in self.held:
                start, stop = self.ranges[index][number]
                if start < stop:
                    self.own[index, number] = self._slice_variable(variable, stop - start)
        self._pieces = {id(own): piece for piece, own in self.own.items()}
        self._padding = keras.Variable(keras.ops.zeros((1,)), trainable=False, name="padding")
        #: The variables of the present update, or of the last one; and the slice variables whose gradients are clipped.
        self._updated = list(range(len(variables)))
        self.clipped: Sequence[Any] = ()
        self._ordering: Any = None
        self._overwrites = bool(getattr(innermost(optimizer), "ema_overwrite_frequency", None))
        self._micro_batches = innermost(optimizer).gradient_accumulation_steps or 1
        self._applied = apply_count(optimizer)

    def _on_change(self, change: Change) -> None:
        """Notes which members are lost."""
        self.holders = self.holders.without({self._present[rank] for rank in change.lost if rank < len(self._present)})
        self._present = self.process_set.communicator.launched

    def join(self, holders: Holders) -> None:
        """Notes which ranks have which slices, on one that has joined since these were cut, and has none."""
        self.holders, self._present = holders, self.process_set.communicator.launched

    def _divided(self, shared: Sequence[int]) -> Sequence[Ranges]:
        sizes = [math.prod(self.variables[index].shape) for index in shared]
        number = len(self.holders.members)
        if not self.by_item:
            return whole_slices(sizes, number)
        return even_slices(sizes, [_least_items(self.variables[index]) for index in shared], number)

    def _slice_variable(self, variable: Any, items: int) -> Any:
        if not self.by_item:
            return variable
        width = _least_items(variable)
        return slice_variables.create(variable, (items,) if width == 1 else (items // width, *variable.shape[1:]))

    @property
    def pieces(self) -> list[Piece]:
        """What the ``slice_variables`` stand for; the last one for nothing."""
        return [*self.own, (-1, ALONE)]

    @property
    def slice_variables(self) -> list[Any]:
        """The optimizer's slice variables; by the last, of no variable, a rank without items counts its updates."""
        return [*self.own.values(), self._padding]

    def index_of(self, variable: Any) -> int:
        """The index of one of the ``variables``."""
        if id(variable) not in self._indices:
            raise ConfigError(
                f"{getattr(variable, 'path', variable.name)} is none of the {len(self.variables)} variables for which "
                "this optimizer was built: compile the model again with a new optimizer."
            )
        return self._indices[id(variable)]

    def is_divided(self, variable: Any) -> bool:
        """Whether ranks have slices of ``variable``: else each trains it alone."""
        return self.index_of(variable) in self.ranges

    def ranges_of(self, variable: Any) -> Ranges:
        """The items of the gradient of ``variable`` that each rank receives; none if each receives it whole."""
        index = self.index_of(variable)
        return () if self.receives_whole else self.ranges.get(index, ())

    def layout(self, index: int) -> GradientKind:
        """How the variable with this index is divided."""
        variable = self.variables[index]
        return GradientKind(tuple(variable.shape), dtype_of(variable), self.ranges[index])

    def pieces_of(self, variable: Any) -> list[Piece]:
        """This rank's pieces of ``variable``."""
        index = self.index_of(variable)
        return [piece for number in (ALONE, *self.held) if (piece := (index, number)) in self.own]

    def cut(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Mapping[Piece, Any] | None]:
        """Returns this rank's pieces of whole gradients; ``None`` stays ``None``."""
        return self._by_piece(self._items, gradients, variables)

    def placed(self, items: Sequence[Any], variables: Sequence[Any]) -> list[Mapping[Piece, Any] | None]:
        """Returns the pieces of the gradients that this rank has received, in the shapes of the slice variables."""
        return self._by_piece(self._items if self.receives_whole else self._shaped, items, variables)

    def _by_piece(
        self, take: Callable[[Any, Piece], Any], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Mapping[Piece, Any] | None]:
        return [
            None if gradient is None else {piece: take(gradient, piece) for piece in self.pieces_of(variable)}
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _shaped(self, gradient: Any, piece: Piece) -> Any:
        sparse = keras_arrays().rows_of(gradient) is not None
        return gradient if sparse else keras.ops.reshape(gradient, tuple(self.own[piece].shape))

    def _items(self, gradient: Any, piece: Piece) -> Any:
        index, number = piece
        if number == ALONE or not self.by_item:
            return gradient
        start, stop = self.ranges[index][number]
        own_shape, shape = tuple(self.own[piece].shape), tuple(self.variables[index].shape)
        rows, width = keras_arrays().rows_of(gradient), _least_items(self.variables[index])
        if rows is not None and width > 1:
            return rows_within(rows[0], rows[1], start // width, own_shape)
        flat = keras.ops.reshape(keras_arrays().to_dense(gradient, shape), (-1,))
        return keras.ops.reshape(flat[start:stop], own_shape)

    # updates ----------------------------------------------------------------------------------------

    def own_pairs(
        self, gradients: Sequence[Mapping[Piece, Any] | None], variables: Sequence[Any], after: Any
    ) -> tuple[list[Any], list[Any]]:
        """Returns this rank's ``placed`` gradients of an update of ``variables``, and their slice variables; the last
        pair is that of the padding. Collectives of a TensorFlow graph are in the order of what they compute with: the
        padding's gradient, of zeros, is computed from ``after``, a number that the reduction has returned.
        """
        indices = list(map(self.index_of, variables))
        self._updated = [index for index, each in zip(indices, gradients, strict=True) if each is not None]
        pairs = [(each, self.own[piece]) for own in gradients if own is not None for piece, each in own.items()]
        zeros = keras.ops.zeros(self._padding.shape)
        self._ordering = zeros if after is None else zeros * keras.ops.cast(after, zeros.dtype)
        pairs.append((self._ordering, self._padding))
        return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]

    def load(self) -> None:
        """Gives the slice variables their items."""
        for piece in self._cut_here:
            index, number = piece
            slice_variables.load(self.own[piece], self.variables[index], self.ranges[index][number][0])

    def gather(self, begin: Callable[[], None], *, everything: bool = False) -> None:
        """Gives the variables of the update the items of all slice variables; then constraints apply. ``begin`` is
        called on the host before. After a micro-batch that is not the last, variables have not changed, and stay.
        """
        everything = everything or self._overwrites
        updated = self.ranges if everything else [index for index in self._updated if index in self.ranges]
        indices = sorted(updated)
        if indices:
            self._gather(indices, begin, 1 if everything else self._micro_batches)
        for piece in self._cut_here:
            slice_variables.release(self.own[piece])
        for index in indices if self.by_item else ():
            variable = self.variables[index]
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    @property
    def _cut_here(self) -> list[Piece]:
        return [piece for piece, own in self.own.items() if own is not self.variables[piece[0]]]

    def _gather(self, indices: Sequence[int], begin: Callable[[], None], every: int) -> None:
        """``every``: of so many micro-batches, the last one makes an update."""
        layout = [self.layout(index) for index in indices]
        here = [(n, place) for place, index in enumerate(indices) for n in self.held if (index, n) in self.own]
        wholes = [self.variables[index].value for index in indices]  # their memory is that of the results, where it may
        in_place = False
        if keras.backend.backend() == "torch":
            from choros.arrays.torch_arrays import TorchArrays

            if int(self._applied.value) % every:
                self.seen = self.process_set.communicator.launched
                return
            in_place = TorchArrays.own_host_memory(wholes)  # the slice variables are parts of them

        def on_host(hosts: Sequence[Array], out: Sequence[Array] | None = None) -> Sequence[Array]:
            if self.is_replaced:
                raise ConfigError(
                    "this function was compiled before slices were cut anew for other ranks, and would update those of "
                    "before: compile it again when ranks have changed."
                )
            communicator = self.process_set.communicator  # another one after shutdown() and init()
            if int(hosts[1]) % every:
                self.seen = communicator.launched
                own = hosts[len(hosts) - len(indices) :]
                return own if out is not None else [each.copy() for each in own]
            held = dict(zip(here, hosts[2:], strict=False))
            if in_place and self.receives_whole:  # what comes of a rank that is lost overwrites the others' items, too
                held = {key: host.copy() for key, host in held.items()}
            begin()
            outs = None if out is None else [each.reshape(-1) for each in out]
            gathered = gather_slices(communicator, layout, held, outs, holders=self.holders)
            self.seen = communicator.launched
            return gathered

        given = [self._padding.value, self._applied.value, *(self.own[indices[place], n].value for n, place in here)]
        given += wholes
        outputs = [ArraySpec(each.shape, each.dtype) for each in layout]
        keeps = keras.backend.backend() != "jax" and not in_place
        values = keras_arrays().host_call(on_host, given, outputs, replaced=len(indices), keeps=keeps)
        if not in_place:
            for index, value in zip(indices, values, strict=True):
                self.variables[index].assign(value)

    # what needs all items ---------------------------------------------------------------------------

    def squares(self, gradients: Sequence[Any]) -> Any:
        """Returns a vector that has the sum of the squares of each variable's gradient, of all slices."""
        sums: dict[Piece, Any] = {}
        for own, gradient in zip(self.clipped, gradients, strict=True):
            if gradient is not None and id(own) in self._pieces:
                rows = keras_arrays().rows_of(gradient)
                values = keras.ops.cast(gradient if rows is None else rows[1], "float32")
                sums[self._pieces[id(own)]] = keras.ops.sum(keras.ops.square(values))
        pieces = list(self.own)

        def on_host(hosts: Sequence[Array]) -> Sequence[Array]:
            communicator = self.process_set.communicator

            def sum_of_all() -> Array:
                sent = self.holders.sent(communicator.launched)[communicator.rank]
                total = np.zeros(len(self.variables), np.float32)
                for (index, number), value in zip(pieces, hosts[0], strict=False):
                    if number in sent:  # of a slice and its copy, one counts
                        total[index] += value
                summed: Array = allreduce(total, Reduction.SUM, process_set=self.process_set)
                return summed

            return [communicator.atomic(sum_of_all)]

        vector = _vector([*(sums.get(piece) for piece in pieces), keras.ops.sum(self._ordering)])
        output = ArraySpec((len(self.variables),), np.dtype(np.float32))
        (shared,) = keras_arrays().host_call(on_host, [vector], [output])
        return shared + _vector([sums.get((index, ALONE)) for index in range(len(self.variables))])

    def scaled(self, gradients: Sequence[Any], factors: Any) -> list[Any]:
        """Returns the gradients times the ``factors`` of their variables."""

        def times(gradient: Any, own: Any) -> Any:
            piece = self._pieces.get(id(own))
            return gradient if gradient is None or piece is None else scaled(gradient, factors[piece[0]], own)

        return [times(*pair) for pair in zip(gradients, self.clipped, strict=True)]


def works_by_item(optimizer: Any) -> bool:
    """Whether an optimizer updates each item of a variable alone; otherwise it needs whole variables.

    Raises:
        ConfigError: it may need all variables.

    >>> works_by_item(keras.optimizers.Adam()), works_by_item(keras.optimizers.Lamb())
    (True, False)
    """
    inner = innermost(optimizer)
    kinds = type(inner).__mro__
    users = [*itertools.takewhile(lambda kind: not kind.__module__.startswith("keras."), kinds)]
    overridden = {name for kind in users if not kind.__module__.startswith("choros.") for name in vars(kind)}
    name = type(inner).__name__
    if isinstance(inner, MultiOptimizer) or overridden & NEED_ALL:
        why = f"it overrides {', '.join(sorted(overridden & NEED_ALL))}" if overridden & NEED_ALL else "it has several"
        raise ConfigError(
            f"shard_state=True: each rank would apply {name} to some variables, or items of them, but {name} may need "
            f"all ({why}): leave shard_state out, or override update_step() only."
        )
    by_item = tuple(getattr(keras.optimizers, each) for each in _BY_ITEM)
    return isinstance(inner, by_item) and not overridden & NEED_VARIABLES


def _least_items(variable: Any) -> int:
    """The number of items of a variable that are not separated: a row of an embedding, whose gradient may be rows."""
    is_table = is_embedding(variable) and keras.backend.backend() == "tensorflow"
    return math.prod(variable.shape[1:]) if is_table else 1


def _vector(numbers: Sequence[Any]) -> Any:
    return keras.ops.stack([keras.ops.zeros(()) if each is None else each for each in numbers])


def rows_within(indices: Any, values: Any, first: int, shape: tuple[int, ...]) -> Any:
    """Returns the rows of a sparse gradient of TensorFlow that are in a slice variable of this ``shape``."""
    import tensorflow as tf

    kept = tf.where((indices >= first) & (indices < first + shape[0]))[:, 0]
    return keras_arrays().from_rows(tf.gather(indices, kept) - first, tf.gather(values, kept), shape)
