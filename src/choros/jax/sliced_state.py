"""Optax transformations of which each rank has a slice of the state, and makes the updates of the items in it, as
``parallel/reduce/slices.py`` shows: by ``tx.update`` on trees of slices, between two host calls.

Transformations that work item by item have even slices, and others whole arrays; ``dependence.py`` finds out.
"""

import itertools
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from choros.arrays import ArraySpec
from choros.arrays.jax_arrays import ADAPTER
from choros.comm import Array, DType, Reduction
from choros.errors import ConfigError, NotInitializedError
from choros.jax.collectives import paths_of
from choros.jax.dependence import programs_of_results, works_by_item
from choros.jax.division import FILES, Division, SlicedState, of_models, refuse_slices, trained_of, with_slices
from choros.jax.reduction import GradientReduction
from choros.parallel.objects import allgather_object
from choros.parallel.ops import allreduce
from choros.parallel.reduce.gradients import GradientKind
from choros.parallel.reduce.slices import gather_slices
from choros.training.thread import doing, thread


@final
class SlicedUpdate:
    """``init`` and ``update`` of ``tx`` where each rank has slices of the state; with one rank, those of ``tx``."""

    def __init__(self, tx: Any, reduction: GradientReduction) -> None:
        self._tx = tx
        self._reduction = reduction
        self._dtypes: dict[Any, tuple[DType, ...]] = {}

    def init(self, params: Any) -> Any:
        """Returns the state for this rank's slices of ``params``."""
        division = self.division(params)
        if division is None:
            return self._tx.init(params)
        return SlicedState(self._tx.init(division.slices_of(params)), division)

    def division(self, params: Any) -> Division | None:
        """How ``params`` are divided; ``None`` if this rank has all."""
        process_set = self._reduction.reducer.process_set
        if process_set.included() is None:
            raise NotInitializedError("init() of distributed(shard_state=True)")
        arrays = trained_of(params)
        if not self._reduction.reducer.active or not arrays:
            return None
        communicator = process_set.communicator
        shapes = tuple((tuple(each.shape), np.dtype(each.dtype)) for each in arrays.values())
        with doing("jax_slices", (process_set, 0)):
            division = Division(works_by_item(self._tx, params), communicator.rank, communicator.size, shapes)
            self._check_without_some(params, list(arrays), division)
        self._reduction.know(arrays)
        return division

    def _check_without_some(self, params: Any, indices: Sequence[int], division: Division) -> None:
        """Checks that ``tx`` works on trees that lack arrays, on all ranks in the same way."""
        specs = [jax.ShapeDtypeStruct(*each) for each in division.params]
        halves = [[spec if position % 2 == odd else None for position, spec in enumerate(specs)] for odd in (0, 1)]
        on_ranks = zip(*division.ranges, strict=True)
        different = dict.fromkeys(tuple(start < stop for start, stop in each) for each in on_ranks)
        pairs_of = (zip(specs, each, strict=True) for each in different)
        of_ranks = [[spec if has or not spec.size else None for spec, has in pairs] for pairs in pairs_of]
        trees = [with_slices(params, indices, each) for each in (specs, *halves, *of_ranks)]

        try:
            whole, *others = (programs_of_results(self._tx, each) for each in trees)
            trees[3:] = [with_slices(params, indices, [None] * len(specs))]
            of_all, *of_halves, of_none = ({*paths_of(jax.eval_shape(self._tx.init, each))} for each in trees)
        except Exception as error:
            raise ConfigError(
                "shard_state=True applies the transformation to trees that have optax.MaskedNode() for parameters of "
                f"which a rank has no part; with these it raised {type(error).__name__}: {error}. Give it no other "
                "trees of arrays than those that init() and update() receive, or leave shard_state out."
            ) from error
        if set.union(*of_halves) != of_all or set.intersection(*of_halves) != of_none:
            raise ConfigError(
                "shard_state=True: the paths of the transformation's state do not tell to which parameter an array of "
                "it belongs, such as those of a list of all arrays. Let init() return trees like the parameters, or "
                "leave shard_state out."
            )
        for result, program in itertools.chain(*(each.items() for each in others)):
            if whole.get(result, program) != program:
                raise ConfigError(
                    f"shard_state=True: the {result} is another one without some of the other parameters, of "
                    "which each rank has some only: the transformation counts them, numbers them, computes in a dtype "
                    "of all (optax.inject_hyperparams has hyperparam_dtype=…), or makes something else each time it is "
                    "traced. Leave shard_state out."
                )

    def update(self, updates: Any, state: Any, params: Any = None, *, examples: Any = 1, **extra_args: Any) -> Any:
        """Returns the updates of all parameters, and this rank's new state."""
        self._reduction.check_initialized()
        division = self._division_of(state, updates)
        if division is None:
            return self._tx.update(updates, state, params, **extra_args)
        _check_scalars(extra_args)
        own = None if params is None else division.slices_of(params)
        gradients = division.arrays_of(updates)
        layout = division.layout([each.dtype for each in gradients.values()])
        values = list(gradients.values())
        reduced, number = self._reduction.reduce_slices(values, layout, division.shapes, params, examples)
        items = iter(reduced)
        slices = [None if shape is None else next(items) for shape in division.shapes]
        with doing("jax_slices", (self._reduction.reducer.process_set, number)):
            new, inner = self._tx.update(with_slices(updates, list(gradients), slices), state.inner, own, **extra_args)
        gathered = self._gathered(new, updates, division, params is not None, number)
        return gathered, SlicedState(inner, division)

    def _division_of(self, state: Any, updates: Any) -> Division | None:
        """How the parameters of ``state`` are divided; ``None`` if this rank trains alone."""
        division = state.division if isinstance(state, SlicedState) else None
        members = None
        if self._reduction.reducer.active:
            communicator = self._reduction.reducer.process_set.communicator
            members = communicator.rank, communicator.size
        if division is None and (members is None or not trained_of(updates)):
            return None
        given = None if division is None else (division.rank, division.ranks)
        if given != members:
            raise ConfigError(
                f"expected was the state of {_description(members)}, and given that of {_description(given)}. {FILES}"
            )
        return division

    def _gathered(self, new: Any, updates: Any, division: Division, has_params: bool, number: Any) -> Any:
        """Returns the updates of all ranks, in the structure of ``updates``; ``new`` are this rank's."""
        leaves, structure = jax.tree.flatten(updates)
        indices = list(trained_of(updates))
        dtypes = self._dtypes_of_updates(updates, division, has_params)
        layout = division.layout(dtypes)
        items = iter(jax.tree.leaves(new))
        absent = {index for index, shape in zip(indices, division.shapes, strict=True) if shape is None}
        own = {index: next(items) for index in range(len(leaves)) if index not in absent}
        here = [position for position, index in enumerate(indices) if index in own]

        def on_host(hosts: Sequence[Array]) -> list[Array]:
            models = hosts[-1].shape
            kinds = [of_models(each, models) for each in layout]
            reducer = self._reduction.reducer
            communicator = reducer.process_set.communicator
            held = {(communicator.rank, position): host for position, host in zip(here, hosts, strict=False)}
            return gather_slices(communicator, kinds, held, name=reducer.name)

        given = [jnp.asarray(own[indices[position]], layout[position].dtype) for position in here]
        outputs = [ArraySpec(each.shape, each.dtype) for each in layout]
        whole = dict(zip(indices, ADAPTER.host_call(on_host, [*given, number], outputs), strict=True))
        return structure.unflatten([whole[index] if index in whole else own[index] for index in range(len(leaves))])

    def _dtypes_of_updates(self, updates: Any, division: Division, has_params: bool) -> tuple[DType, ...]:
        """The dtypes of all updates, of which this rank makes some; ``tx`` is traced once for them."""
        given = trained_of(updates)
        structure = jax.tree.structure(updates)
        key = (division, structure, tuple(each.dtype for each in given.values()), has_params)
        if key not in self._dtypes:
            specs = [jax.ShapeDtypeStruct(*each) for each in division.params]
            params = with_slices(updates, list(given), specs)
            gradients = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given.values()]
            state = jax.eval_shape(self._tx.init, params)
            own = params if has_params else None
            results, _ = jax.eval_shape(self._tx.update, with_slices(updates, list(given), gradients), state, own)
            leaves = jax.tree.leaves(results)
            self._dtypes[key] = tuple(np.dtype(leaves[index].dtype) for index in given)
        return self._dtypes[key]

    # the state of one process -----------------------------------------------------------------------

    def whole(self, state: SlicedState, params: Any) -> Any:
        """Gathers the state of one process, one array at a time."""
        division = state.division
        self._division_of(state, params)
        division.arrays_of(params)
        process_set = self._reduction.reducer.process_set
        expected = jax.eval_shape(self._tx.init, params)
        own = dict(_with_paths(state.inner))
        if not {*own} <= {*paths_of(expected)}:
            raise ConfigError("whole_state was given the state of another transformation, or of other parameters.")
        owners = self._owners(params, division)
        dtypes = {path: np.dtype(value.dtype) for path, value in own.items()}
        of_ranks, communicator = allgather_object(dtypes, process_set=process_set), process_set.communicator
        values = []
        for path, spec in _with_paths(expected):
            if path not in owners:
                values.append(np.asarray(own[path]))
                continue
            dtype = next(each[path] for each in of_ranks if path in each)  # the steps may have changed it
            layout = GradientKind(spec.shape, dtype, division.ranges_of_state(owners[path], spec.shape))
            items = np.asarray(own.get(path, np.empty(0)), dtype).reshape(-1)[: layout.items(division.rank)]
            held = {(communicator.rank, 0): items}
            values += gather_slices(communicator, [layout], held, name=self._reduction.reducer.name)
        return jax.tree.structure(expected).unflatten(values)

    def own(self, whole: Any, params: Any) -> Any:
        """Cuts this rank's state out of that of one process."""
        expected = jax.eval_shape(self._tx.init, params)
        shapes = [np.shape(each) for each in jax.tree.leaves(whole)]
        same = jax.tree.structure(whole) == jax.tree.structure(expected)
        if not same or shapes != [each.shape for each in jax.tree.leaves(expected)]:
            raise ConfigError(
                "own_state was given another state than that of one process, which tx.init(params) returns: was it "
                f"saved with another transformation, or other parameters? {FILES}"
            )
        division = self.division(params)
        if division is None:
            return jax.tree.map(jnp.asarray, whole)
        values, owners = dict(_with_paths(whole)), self._owners(params, division)
        own = jax.eval_shape(lambda params: self._tx.init(division.slices_of(params)), params)
        cut = []
        for path, spec in _with_paths(own):
            value = jnp.asarray(values[path])
            if path in owners and value.shape != spec.shape:
                value = value.reshape(-1)[slice(*division.ranges[owners[path]][division.rank])].reshape(spec.shape)
            cut.append(value)
        return SlicedState(jax.tree.structure(own).unflatten(cut), division)

    def _owners(self, params: Any, division: Division) -> dict[str, int]:
        """The parameter to which each array of the state belongs: with no other parameter it would be there, too."""
        indices, specs = list(trained_of(params)), [jax.ShapeDtypeStruct(*each) for each in division.params]

        def paths_with(position: int | None) -> set[str]:
            only = [spec if index == position else None for index, spec in enumerate(specs)]
            return {*paths_of(jax.eval_shape(self._tx.init, with_slices(params, indices, only)))}

        common = paths_with(None)
        return {path: position for position in range(len(specs)) for path in paths_with(position) - common}


def whole_state(tx: Any, state: Any, params: Any) -> Any:
    """Returns the state that ``tx`` would have in one process, to save it; all ranks must call it.

    The file is that of the transformation in one process: plain optax can go on with it, and any number of ranks, of
    which each calls ``own_state``. The state is gathered one array at a time.

    Args:
        tx: what ``distributed(…, shard_state=True)`` has returned.
        state: this rank's state.
        params: the parameters.

    Returns:
        The state of ``distributed``'s transformation, of NumPy arrays, the same on every rank; of one rank, ``state``.

    Raises:
        ConfigError: ``tx`` or ``state`` is another one, or it was called inside ``jax.jit``.
        MismatchError: ranks have different states.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd, optax
        >>> hvd.init()
        >>> tx = hvd.distributed(optax.adam(0.1), shard_state=True)
        >>> params = {"w": jnp.ones(2)}
        >>> hvd.whole_state(tx, tx.init(params), params)[0].mu
        {'w': Array([0., 0.], dtype=float32)}
    """
    update = _sliced_update(tx, "whole_state")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, params))):
        raise ConfigError("whole_state was called inside jax.jit or another transformation: call it outside of it.")
    jax.effects_barrier()
    return update.whole(state, params) if isinstance(state, SlicedState) else state


def own_state(tx: Any, whole: Any, params: Any) -> Any:
    """Returns this rank's part of a state that one process would have, such as ``whole_state`` has returned.

    Each rank cuts its slices of the whole state, without communication.

    Args:
        tx: what ``distributed(…, shard_state=True)`` has returned.
        whole: the state of the transformation that ``distributed`` was given, saved by any number of ranks.
        params: the parameters.

    Returns:
        The state to train with. With one rank, ``whole``.

    Raises:
        ConfigError: ``tx`` or ``whole`` is another one.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd, optax
        >>> hvd.init()
        >>> tx = hvd.distributed(optax.adam(0.1), shard_state=True)
        >>> params = {"w": jnp.ones(2)}
        >>> whole = optax.adam(0.1).init(params)
        >>> updates, state = tx.update({"w": jnp.ones(2)}, hvd.own_state(tx, whole, params), params)
    """
    refuse_slices(whole, "own_state")
    return _sliced_update(tx, "own_state").own(whole, params)


def _sliced_update(tx: Any, what: str) -> SlicedUpdate:
    update = getattr(getattr(tx, "init", None), "__self__", None)
    if not isinstance(update, SlicedUpdate):
        raise ConfigError(
            f"{what} was given {tx!r}: expected was what distributed(…, shard_state=True) has returned. Of "
            "transformations around it, such as optax.MultiSteps, pass that one, and its part of the state."
        )
    return update


def _with_paths(tree: Any) -> list[tuple[str, Any]]:
    return list(zip(paths_of(tree), jax.tree.leaves(tree), strict=True))


def _description(member: tuple[int, int] | None) -> str:
    return "one process" if member is None else f"rank {member[0]} of {member[1]}"


def _check_scalars(extra_args: Any) -> None:
    wrong = [name for name, value in extra_args.items() if callable(value) or any(map(np.ndim, jax.tree.leaves(value)))]
    if wrong:
        raise ConfigError(
            f"update({wrong[0]}=…) with shard_state=True: arguments for the transformation can be numbers only, as "
            "each rank applies it to its slices. Leave shard_state out."
        )


# clipping by the norm of gradients of which each rank has slices ------------------------------------


def clip_by_global_norm(max_norm: Any) -> Any:
    """Returns ``optax.clip_by_global_norm`` that also works in ``distributed(…, shard_state=True)``.

    There the norm is that of the gradients of all ranks' slices, a number summed in each step; elsewhere, optax's own.

    Args:
        max_norm: the largest norm of all gradients together: larger gradients are scaled to it.

    Returns:
        An ``optax.GradientTransformation`` without state.

    Raises:
        ImportError: optax is not installed.

    Example:
        >>> import jax.numpy as jnp, choros.jax as hvd, optax
        >>> hvd.init()
        >>> tx = optax.chain(hvd.clip_by_global_norm(1.0), optax.sgd(1.0))
        >>> tx = hvd.distributed(tx, shard_state=True)
        >>> params = {"w": jnp.zeros(2)}
        >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params), params)
        >>> optax.apply_updates(params, updates)
        {'w': Array([-0.6, -0.8], dtype=float32)}
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError("choros.jax.clip_by_global_norm needs optax: pip install optax.") from error
    plain = optax.clip_by_global_norm(max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        slices = thread.jax_slices
        if slices is None:
            return plain.update(updates, state, params)
        process_set, number = slices  # a rank that has none would compute the norm while JAX traces the step
        norm = jnp.sqrt(allreduce(_squares(updates, number), Reduction.SUM, process_set=process_set))

        def clipped(gradient: Any) -> Any:  # as optax computes it
            return jnp.where(norm < max_norm, gradient, (gradient / norm.astype(gradient.dtype)) * max_norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(plain.init, update)


def _squares(gradients: Any, number: Any) -> Any:
    """The sum of the squares of all items."""
    # A rank may have no item, so its dtypes do not tell what those of others are promoted to.
    total = jnp.zeros((), jnp.float64 if jax.config.jax_enable_x64 else jnp.float32) + 0 * number
    for gradient in jax.tree.leaves(gradients):
        if jnp.issubdtype(gradient.dtype, jnp.inexact):
            total += jnp.sum(jnp.square(jnp.abs(gradient)), dtype=jnp.promote_types(jnp.float32, gradient.real.dtype))
    return total
