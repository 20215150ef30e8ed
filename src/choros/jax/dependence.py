"""What an optax transformation needs for the update of an item: this item, its array, or several arrays.

Its functions do not say. So they are traced, as by ``jax.jit``, and the trace is followed: on what does each value
depend? Two parameters, a and b, of a transformation that clips by the global norm::

    gradients      a, item by item        b, item by item
    squares        a, item by item        b, item by item
    sum            a, all of it           b, all of it
    norm                       a and b                         so the update of a needs b

Other traces have parameters of other shapes, in as many dimensions: if one is another program, shapes matter.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from choros.errors import ConfigError
from choros.jax.collectives import paths_of
from choros.training.jax_forms import called_by

#: The primitives of which each item of a result needs the items at its place.
_BY_ITEM_NAMES = """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    conj convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or population_count pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor"""
_BY_ITEM = frozenset(_BY_ITEM_NAMES.split())
#: A program that JAX has traced, and its constants.
_Program = tuple[Any, Sequence[Any]]
#: Random numbers are drawn for all arrays, in their order.
_RANDOM = ("random_", "threefry", "rng_")


class _Leaf(NamedTuple):
    """The arrays a value depends on; ``by_item``: each item on those at its place, in a part of an array as in all."""

    arrays: frozenset[int]
    by_item: bool

    def joined(self, other: "_Leaf") -> "_Leaf":
        return _Leaf(self.arrays | other.arrays, self.by_item and other.by_item)


_SAME_EVERYWHERE = _Leaf(frozenset(), by_item=True)
#: Of no array alone.
_RANDOM_NUMBERS = _Leaf(frozenset((-1, -2)), by_item=False)
_DIFFER = "two traces are not the same program"


class _Traced(NamedTuple):
    """``init`` and ``update`` of a transformation, traced for some shapes."""

    init: Any
    update: Any
    updates: int
    states: list[Any]


def works_by_item(tx: Any, params: Any) -> bool:
    """Whether the update of an item depends on this item alone; otherwise it needs its array. ``tx`` is not run.

    Raises:
        ConfigError: an update depends on several arrays, or ``tx`` needs arguments beside gradients and parameters.

    >>> import optax
    >>> params = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    >>> works_by_item(optax.adam(0.1), params), works_by_item(optax.lamb(0.1), params)
    (True, False)
    """
    try:
        whole = _traced(tx, params, lambda shape: shape)
    except Exception as error:
        raise ConfigError(
            "shard_state=True traces the transformation to find out what an update depends on, with parameters and "
            f"gradients alone, which raised {type(error).__name__}: {error}. Leave shard_state out for transformations "
            "that need more arguments."
        ) from error
    try:
        pairs = [_followed(whole, _traced(tx, params, shape_of)) for shape_of in (_of_one_item, _of_one_row)]
        updates, states = ([*map(_joined, zip(*each, strict=True))] for each in zip(*pairs, strict=True))
    except Exception:  # noqa: BLE001 - the user's code cannot compute with parts of arrays, or computes something else
        updates, states = _followed(whole, whole)
        updates = [each._replace(by_item=False) for each in updates]
    paths = paths_of(params)
    for index, value in enumerate(updates):
        _check_alone(value.arrays | {index}, f"the update of {paths[index]}", paths)
    for value in states:
        _check_alone(value.arrays, "the transformation's state", paths)
    return all(value.by_item for value in (*updates, *states))


def programs_of_results(tx: Any, params: Any) -> dict[str, int]:
    """A number for the program of each result of the first update, by what it is: equal for equal programs.

    >>> import optax
    >>> params = {"a": jnp.ones((2, 3)), "b": jnp.ones(4)}
    >>> alone = programs_of_results(optax.adam(0.1), {"b": params["b"]})
    >>> [*alone]
    ["update of ['b']", 'state [0].count', "state [0].mu['b']", "state [0].nu['b']"]
    >>> alone.items() <= programs_of_results(optax.adam(0.1), params).items()
    True
    """

    def update(params: Any) -> Any:
        return tx.update(params, tx.init(params), params)

    traced, (updates, state) = jax.make_jaxpr(update, return_shape=True)(params)
    given = list(map(hash, paths_of(params)))
    names = [f"update of {path}" for path in paths_of(updates)] + [f"state {path}" for path in paths_of(state)]
    return dict(zip(names, _programs(traced.jaxpr, traced.consts, given), strict=True))


def _programs(jaxpr: Any, constants: Sequence[Any], given: Sequence[int]) -> list[int]:
    """A number for the program of each result, from those of the arguments."""
    known = dict(zip(jaxpr.invars, given, strict=True))
    known |= {variable: _number_of(value) for variable, value in zip(jaxpr.constvars, constants, strict=True)}

    def read(variable: Any) -> int:
        return _number_of(variable.val) if isinstance(variable, Literal) else known[variable]

    for step in jaxpr.eqns:
        known.update(zip(step.outvars, _programs_of_results(step, list(map(read, step.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def _programs_of_results(step: Any, arguments: list[int]) -> list[int]:
    """The same for the results of one operation."""
    name = step.primitive.name
    if (called := called_by(step)) is not None:
        return _programs(*called, arguments)
    if name == "cond":
        branches = [_programs(each.jaxpr, each.consts, arguments[1:]) for each in step.params["branches"]]
        return [hash((arguments[0], *results)) for results in zip(*branches, strict=True)]
    parameters = re.sub(r" at 0x\w+", "", str(step.params))  # functions have addresses
    known = () if _is_number_of_all_ranks(step) else arguments
    return [hash((name, parameters, position, *known)) for position, _ in enumerate(step.outvars)]


def _number_of(value: Any) -> int:
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(getattr(value, "dtype", bool), jax.dtypes.extended):
        return id(value)
    array = np.asarray(value)
    return hash((array.shape, array.dtype.name, array.tobytes()))


def _is_number_of_all_ranks(step: Any) -> bool:
    """Whether an operation is the norm of ``clip_by_global_norm``."""
    return step.primitive.name == "choros_host_call" and not any(each.aval.shape for each in step.outvars)


def _check_alone(arrays: frozenset[int], what: str, paths: Sequence[str]) -> None:
    if len(arrays) < 2:
        return
    named = "random numbers for all parameters"
    if min(arrays) >= 0:
        first, second = (paths[index] for index in sorted(arrays)[:2])
        named = f"{first} and {second}" if len(arrays) == 2 else f"{first}, {second} and {len(arrays) - 2} more"
    raise ConfigError(
        f"shard_state=True: {what} depends on {named}, but each rank has some of the parameters only. Clip by "
        "choros.jax.clip_by_global_norm() instead of optax's, or leave shard_state out."
    )


def _of_one_item(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * len(shape)


def _of_one_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As slices are, of which none has so many items: the last dimension differs also where it is 1."""
    return (*(1 for _ in shape[1:]), math.prod(shape) + 1) if shape else shape


def _traced(tx: Any, params: Any, shape_of: Callable[[tuple[int, ...]], tuple[int, ...]]) -> _Traced:
    def spec(leaf: Any) -> Any:
        array = jax.eval_shape(jnp.asarray, leaf)
        return jax.ShapeDtypeStruct(shape_of(array.shape), array.dtype)

    specs = jax.tree.map(spec, params)
    init, state = jax.make_jaxpr(tx.init, return_shape=True)(specs)
    update, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(specs, state, specs)
    number = len(jax.tree.leaves(updates))
    if jax.tree.structure(updates) != jax.tree.structure(specs):
        raise TypeError("the updates are a tree of another structure than the parameters")
    return _Traced(init, update, number, [path for path, _ in jax.tree_util.tree_leaves_with_path(state)])


def _followed(trace: _Traced, other: _Traced) -> tuple[list[_Leaf], list[_Leaf]]:
    """Returns what updates and states depend on after any number of steps."""
    if trace.states != other.states:
        raise ValueError(_DIFFER)
    params = [_Leaf(frozenset((index,)), by_item=True) for index in range(trace.updates)]
    states = _values(_opened(trace.init), _opened(other.init), params)
    while True:
        results = _values(_opened(trace.update), _opened(other.update), [*params, *states, *params])
        updates, after = results[: trace.updates], results[trace.updates :]
        joined = [before.joined(value) for before, value in zip(states, after, strict=True)]
        if joined == states:
            return updates, states
        states = joined


def _opened(closed: Any) -> _Program:
    return closed.jaxpr, closed.consts


def _values(program: _Program, other_program: _Program, given: Sequence[_Leaf]) -> list[_Leaf]:
    """Returns the values of the results of a traced function; ``other_program`` is the same for other shapes."""
    (jaxpr, constants), (other, others) = program, other_program
    if len(jaxpr.eqns) != len(other.eqns):
        raise ValueError(_DIFFER)
    known: dict[Any, _Leaf] = dict(zip(jaxpr.invars, given, strict=True))
    for variable, constant, its_constant in zip(jaxpr.constvars, constants, others, strict=True):
        known[variable] = _Leaf(frozenset(), by_item=_number_of(constant) == _number_of(its_constant))

    def read(variable: Any, its: Any) -> _Leaf:
        if not isinstance(variable, Literal):
            return known[variable]
        if not isinstance(its, Literal) or _number_of(variable.val) != _number_of(its.val):
            raise ValueError(_DIFFER)
        return _SAME_EVERYWHERE

    for step, its in zip(jaxpr.eqns, other.eqns, strict=True):
        if step.primitive is not its.primitive:
            raise ValueError(_DIFFER)
        arguments = list(map(read, step.invars, its.invars))
        known.update(zip(step.outvars, _results(step, its, arguments), strict=True))
    return list(map(read, jaxpr.outvars, other.outvars))


def _results(step: Any, its: Any, arguments: Sequence[_Leaf]) -> list[_Leaf]:
    """Returns the values of the results of one operation."""
    name, number = step.primitive.name, len(step.outvars)
    if (called := called_by(step)) is not None and (other := called_by(its)) is not None:
        return _values(called, other, arguments)
    if name == "cond":
        chosen, *rest = arguments
        chosen = chosen._replace(by_item=not chosen.arrays)
        branches = zip(step.params["branches"], its.params["branches"], strict=True)
        of_branches = [_values(_opened(branch), _opened(other), rest) for branch, other in branches]
        return [_joined([chosen, *values]) for values in zip(*of_branches, strict=True)]
    if _is_number_of_all_ranks(step):
        return [_SAME_EVERYWHERE] * number
    if name.startswith(_RANDOM):
        return [_RANDOM_NUMBERS] * number
    value = _joined(arguments)
    if name in _BY_ITEM:
        if step.params != its.params:
            raise ValueError(_DIFFER)
        return [value] * number
    if name == "optimization_barrier":
        return list(arguments)
    before, after = step.invars[0].aval.shape if step.invars else None, step.outvars[0].aval.shape
    if name == "broadcast_in_dim" and (before == after or (not value.arrays and not before)):
        return [value]
    # What depends neither on arrays nor on their shapes is the same for a part of an array.
    pairs = zip((*step.invars, *step.outvars), (*its.invars, *its.outvars), strict=False)
    resized = any(one.aval.shape != two.aval.shape for one, two in pairs)
    return [value._replace(by_item=value.by_item and not value.arrays and not resized)] * number


def _joined(values: Sequence[_Leaf]) -> _Leaf:
    return functools.reduce(_Leaf.joined, values, _SAME_EVERYWHERE)
