"""Each collective of a framework's face, of each dtype, eager and compiled, and its gradient, against NumPy.

A ``Row`` of the table gives a collective twice: its name and arguments, and what it returns on all ranks, in NumPy. The
expected gradient follows from the latter, because collectives that have one are linear. What is not supported is in
``case_what_is_not_supported_is_an_error``. Failures name the row, the dtype and how it was called.

A compiled function has all rows of all dtypes: to compile each for itself would take most of the time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from arrays.frameworks import FRAMEWORK, compiled, dtype_name, dtypes, make
from choros.arrays import adapter_of
from choros.comm import BFLOAT16
from choros.errors import ConfigError, MismatchError
from choros.parallel import horovod, ops
from choros.topology import shard_range

framework: Any = import_module(FRAMEWORK)
#: The face; of NumPy's arrays, what all have in common.
hvd: Any = (
    SimpleNamespace(**(vars(horovod) | vars(ops))) if FRAMEWORK == "numpy" else import_module(f"choros.{FRAMEWORK}")
)

#: Of one array: from those of all ranks to the results of all ranks.
Definition = Callable[[list[NDArray]], list[NDArray]]
BOOLEANS, INTEGERS, FLOATS = "booleans", "integers", "floats"
#: The functions whose gradients are Horovod's, in faces that Horovod has: how many times the adjoint.
HOROVOD = {"allgather": lambda size: 1 / size, "broadcast": lambda size: 1 / size, "reducescatter": float}


def size() -> int:
    return int(hvd.size())


@dataclass(frozen=True)
class Row:
    """A collective.

    Attributes:
        function: its name in the face.
        definition: what it does.
        options: its arguments but the first one.
        given: the first argument, made of the array and the number of a rank: an array, or a list of them.
        kinds: of dtypes that it takes.
        linear: whether its gradient is its adjoint, but for Horovod's factor.
        static: whether ``jax.jit`` knows the shape of its result.
    """

    function: str
    definition: Definition
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[Any, int], Any] = lambda x, _: x
    kinds: tuple[str, ...] = (BOOLEANS, INTEGERS, FLOATS)
    linear: bool = True
    static: bool = True

    def variants(self) -> Iterator[tuple[str, Callable[..., list[Any]]]]:
        """How it is called: also asynchronously and in place, where the face has that."""
        in_place = ("_", "_async_") if FRAMEWORK == "torch" else ()  # TensorFlow's are of variables
        for suffix in ("", "_async", *in_place):
            function = getattr(hvd, self.function + suffix, None)
            if function is not None:
                yield self.function + suffix, functools.partial(self._called, function, suffix)

    def _called(self, function: Callable[..., Any], suffix: str, x: Any, **name: str) -> list[Any]:
        given = self.given(x, hvd.rank())
        if suffix in ("_", "_async_"):
            given = [each.clone() for each in given] if isinstance(given, list) else given.clone()
        result = function(given, **self.options, **name)
        result = hvd.synchronize(result) if suffix.startswith("_async") else result
        if suffix in ("_", "_async_"):
            assert all(a is b for a, b in zip(_listed(result), _listed(given), strict=True)), "not in place"
        return _listed(result[0] if isinstance(result, tuple) else result)  # alltoall also returns counts

    def expected(self, inputs: Sequence[NDArray]) -> list[list[NDArray]]:
        """The results of each rank."""
        groups = [_listed(self.given(x, rank)) for rank, x in enumerate(inputs)]
        return [
            list(each) for each in zip(*(self.definition(list(xs)) for xs in zip(*groups, strict=True)), strict=True)
        ]

    def differentiable(self) -> bool:
        """Horovod passes gradients through an allreduce that is not linear by the same operation."""
        return self.linear or (FRAMEWORK != "jax" and self.function.endswith("allreduce"))

    def gradient(self, weights: Sequence[Sequence[NDArray]], shape: tuple[int, ...]) -> NDArray:
        """This rank's gradient of the sum over all ranks of the results times ``weights``."""
        if not self.linear:
            passed_on = [self.definition(list(each))[hvd.rank()] for each in zip(*weights, strict=True)]
            gradient = np.zeros(shape)
            for part, upstream in zip(_listed(self.given(gradient, hvd.rank())), passed_on, strict=True):
                part += upstream  # a view of the gradient
            return gradient
        gradient = np.zeros(shape)
        zeros = [np.zeros(shape) for _ in weights]
        for index in np.ndindex(*shape):
            one = np.zeros(shape)
            one[index] = 1
            results = self.expected([one if rank == hvd.rank() else zero for rank, zero in enumerate(zeros)])
            gradient[index] = sum(
                (result * weight).sum()
                for pair in zip(results, weights, strict=True)
                for result, weight in zip(*pair, strict=True)
            )
        factor = HOROVOD.get(self.function.removeprefix("grouped_")) if FRAMEWORK != "jax" else None
        return gradient * (factor(len(weights)) if factor else 1)


def reduced(function: Callable[..., Any], factor: float = 1.0) -> Definition:
    return lambda xs: [function(np.stack(xs), axis=0) * factor] * len(xs)


def scattered(function: Callable[..., Any], factor: float = 1.0) -> Definition:
    def definition(xs: list[NDArray]) -> list[NDArray]:
        total = function(np.stack(xs), axis=0) * factor
        return [total[slice(*shard_range(len(total), rank, len(xs)))] for rank in range(len(xs))]

    return definition


def concatenated(xs: list[NDArray]) -> list[NDArray]:
    return [np.concatenate(xs)] * len(xs)


def adasum(xs: list[NDArray]) -> list[NDArray]:
    vectors = xs
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=False)
        odd = vectors[-1:] if len(vectors) % 2 else []
        vectors = [a + b - (a * b).sum() / 2 * (a / (a * a).sum() + b / (b * b).sum()) for a, b in pairs] + odd
    return vectors * len(xs)


def sent_by(splits_of: Callable[[int], Sequence[int]]) -> Definition:
    def definition(xs: list[NDArray]) -> list[NDArray]:
        edges = [np.cumsum([0, *splits_of(rank)]) for rank in range(len(xs))]
        return [
            np.concatenate([x[start[to] : start[to + 1]] for x, start in zip(xs, edges, strict=True)])
            for to in range(len(xs))
        ]

    return definition


def splits_of(rank: int) -> list[int]:
    """Different ones of each rank; one row stays."""
    return [int(each) for each in np.roll([0, 3, *[2] * (size() - 2)], rank)]


def table() -> dict[str, Row]:
    numbers = (INTEGERS, FLOATS)

    def two(x: Any, _: int) -> Any:
        return [x, x[1:]]

    def shorter(x: Any, _: int) -> Any:
        return x[:-1]

    def own(x: Any, rank: int) -> Any:
        return x[:rank]

    def scalar(x: Any, _: int) -> Any:
        return x[0, 0, ...]

    scales = {"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 3.0}
    # Adasum of multiples is that multiple of Adasum.
    adasums = {"op": hvd.Adasum, "prescale_factor": 2.0, "postscale_factor": 0.5}
    nonlinear = {"minimum": (hvd.Min, np.min), "maximum": (hvd.Max, np.max), "product": (hvd.Product, np.prod)}
    return {
        "sum": Row("allreduce", reduced(np.sum), {"op": hvd.Sum}),
        "sum of scalars": Row("allreduce", reduced(np.sum), {"op": hvd.Sum}, scalar),
        "average": Row("allreduce", reduced(np.mean), kinds=numbers),
        "scaled": Row("allreduce", reduced(np.sum, 6.0), scales, kinds=numbers),
        "adasum": Row("allreduce", adasum, {"op": hvd.Adasum}, kinds=(FLOATS,), linear=False),
        **{name: Row("allreduce", reduced(of), {"op": op}, linear=False) for name, (op, of) in nonlinear.items()},
        "sums": Row("grouped_allreduce", reduced(np.sum), {"op": hvd.Sum}, two),
        "averages": Row("grouped_allreduce", reduced(np.mean), given=two, kinds=numbers),
        "scaled sums": Row("grouped_allreduce", reduced(np.sum, 6.0), scales, two, kinds=numbers),
        "adasums": Row("grouped_allreduce", adasum, adasums, two, kinds=(FLOATS,), linear=False),
        "allgather": Row("allgather", concatenated),
        "allgather of scalars": Row("allgather", lambda xs: [np.stack(xs)] * len(xs), given=scalar),
        "allgather of numbers of rows": Row("allgather", concatenated, given=own, static=False),
        "allgathers": Row("grouped_allgather", concatenated, given=two),
        "allgathers of numbers of rows": Row(
            "grouped_allgather", concatenated, given=lambda x, rank: [x[:rank], x[rank:]], static=False
        ),
        "broadcast": Row("broadcast", lambda xs: xs[-1:] * len(xs), {"root_rank": size() - 1}),
        "reducescatter": Row("reducescatter", scattered(np.sum), {"op": hvd.Sum}, shorter),
        "mean, scattered": Row("reducescatter", scattered(np.mean), kinds=numbers),
        "maximum, scattered": Row("reducescatter", scattered(np.max), {"op": hvd.Max}, shorter, linear=False),
        "scaled, scattered": Row("reducescatter", scattered(np.sum, 6.0), scales, shorter, kinds=numbers),
        "sums, scattered": Row("grouped_reducescatter", scattered(np.sum), {"op": hvd.Sum}, two),
        "means, scattered": Row("grouped_reducescatter", scattered(np.mean), given=two, kinds=numbers),
        "alltoall": Row("alltoall", sent_by(lambda _: [2] * size())),
        "alltoall by splits": Row("alltoall", sent_by(splits_of), {"splits": splits_of(hvd.rank())}, static=False),
    }


def kind_of(dtype: np.dtype) -> str:
    return BOOLEANS if dtype == np.bool_ else INTEGERS if dtype.kind in "iu" else FLOATS


def values(rank: int) -> NDArray:
    """Numbers from 1 to 3: their sums and products are exact in each dtype."""
    return ((np.arange(4 * size()) * (rank + 1)) % 3 + 1).reshape(2 * size(), 2).astype(np.float64)


def as_dtype(values: NDArray, dtype: np.dtype) -> NDArray:
    return np.trunc(values).astype(dtype) if dtype.kind in "iu" else values.astype(dtype)


def check(results: Sequence[Any], expected: Sequence[NDArray], dtype: np.dtype, what: str) -> None:
    """Checks that the results are arrays of the framework with these values, up to one rounding."""
    for result, value in zip(results, expected, strict=True):
        host = adapter_of(result).to_host(result)
        assert type(result) is type(make(host)), what
        assert (dtype_name(result), host.shape) == (dtype.name, value.shape), what
        tolerance = 0.0 if kind_of(dtype) != FLOATS else float(np.finfo(np.float32).eps) * 2
        tolerance = {np.dtype(np.float16): 2e-3, BFLOAT16: 1e-2}.get(dtype, tolerance)
        wanted = as_dtype(value, dtype).astype(np.float64)
        np.testing.assert_allclose(host.astype(np.float64), wanted, rtol=tolerance, err_msg=what)


def named(row: Row, what: str) -> dict[str, str]:
    """Names differ, as those of tensors do; TensorFlow's grouped_reducescatter has none, as in Horovod."""
    nameless = FRAMEWORK == "tensorflow" and row.function == "grouped_reducescatter"
    return {} if nameless else {"name": what}


def combinations(accepted: Callable[[Row], bool], of: Sequence[np.dtype]) -> list[tuple[str, Row, np.dtype]]:
    rows = [(name, row) for name, row in table().items() if accepted(row)]
    return [
        (f"{name}, {dtype}", row, dtype)
        for (name, row), dtype in itertools.product(rows, of)
        if kind_of(dtype) in row.kinds
    ]


def all_dtypes() -> list[tuple[Any, list[np.dtype]]]:
    """Dtypes, with the context in which the framework has them: JAX has those of 64 bits on request."""
    own = [(nullcontext(), dtypes())]
    if FRAMEWORK == "jax":
        own.append((framework.enable_x64(True), [np.dtype(name) for name in ("int64", "uint64", "float64")]))
    return own


def inputs_of(dtype: np.dtype) -> list[NDArray]:
    """All ranks' arrays, as float64."""
    return [values(rank).astype(dtype).astype(np.float64) for rank in range(size())]


def case_values_of_each_dtype() -> None:
    for context, some in all_dtypes():
        with context:
            for what, row, dtype in combinations(lambda _: True, some):
                inputs = inputs_of(dtype)
                x, expected = make(inputs[hvd.rank()].astype(dtype)), row.expected(inputs)[hvd.rank()]
                for variant, call in row.variants():
                    text = f"{what}, {variant}"
                    check(call(x, **named(row, text)), expected, dtype, text)


def results_of(rows: Sequence[tuple[str, Row, np.dtype]], xs: Mapping[str, Any]) -> list[list[Any]]:
    return [next(row.variants())[1](xs[dtype.name], **named(row, what)) for what, row, dtype in rows]


def case_values_of_each_dtype_in_a_compiled_function() -> None:
    for context, some in all_dtypes():
        with context:
            rows = combinations(lambda row: row.static or FRAMEWORK != "jax", some)

            results = compiled(functools.partial(results_of, rows))(
                {each.name: make(values(hvd.rank()).astype(each)) for each in some}
            )
            for (what, row, dtype), given in zip(rows, results, strict=True):
                check(given, row.expected(inputs_of(dtype))[hvd.rank()], dtype, f"{what}, compiled")


def case_gradients_of_each_dtype() -> None:
    for context, some in all_dtypes():
        with context:
            rows = combinations(Row.differentiable, [each for each in some if kind_of(each) == FLOATS])
            weights = {
                what: [
                    [
                        ((np.arange(each.size) + rank + i) % 3 + 1.0).reshape(each.shape)
                        for i, each in enumerate(results)
                    ]
                    for rank, results in enumerate(row.expected(inputs_of(dtype)))
                ]
                for what, row, dtype in rows
            }
            for how, indices, gradients in _gradients(rows, weights):
                for index, gradient in zip(indices, gradients, strict=True):
                    what, row, dtype = rows[index]
                    expected = row.gradient(weights[what], values(0).shape)
                    check([gradient], [expected], dtype, f"gradient of {what}, {how}")


def _gradients(
    rows: Sequence[tuple[str, Row, np.dtype]], weights: Mapping[str, Any]
) -> Iterator[tuple[str, list[int], list[Any]]]:
    """How the gradients were computed, of which rows, and they themselves."""
    xs = [make(values(hvd.rank()).astype(dtype)) for _, _, dtype in rows]
    own = [[make(each.astype(dtype)) for each in weights[what][hvd.rank()]] for what, _, dtype in rows]
    static = [index for index, (_, row, _) in enumerate(rows) if row.static]

    everything = list(range(len(rows)))

    def results(index: int, x: Any) -> list[Any]:
        what, row, _ = rows[index]
        return next(row.variants())[1](x, **named(row, what))

    if FRAMEWORK == "torch":
        for index, x in enumerate(xs):
            framework.autograd.backward(results(index, x.requires_grad_()), own[index])
        yield "backward()", everything, [x.grad for x in xs]
    elif FRAMEWORK == "jax":
        jax = framework

        def of_vjp(indices: Sequence[int]) -> Callable[[Any, Any], list[Any]]:
            return lambda given, own: [
                jax.vjp(functools.partial(results, index), given[index])[1](own[index])[0] for index in indices
            ]

        yield "jax.vjp", everything, of_vjp(everything)(xs, own)
        yield "jax.vjp in jax.jit", static, jax.jit(of_vjp(static))(xs, own)
    else:

        def of_tape(*given: Any) -> list[Any]:
            gradients = []
            for index, x in enumerate(given):
                with framework.GradientTape() as tape:
                    tape.watch(x)
                    found = results(index, x)
                gradients.append(tape.gradient(found, x, output_gradients=own[index]))
            return gradients

        yield "GradientTape", everything, of_tape(*xs)
        # Shapes are known only when it runs.
        signature = [framework.TensorSpec([None, None], x.dtype) for x in xs]
        yield (
            "GradientTape in a tf.function",
            everything,
            framework.function(of_tape, input_signature=signature, autograph=False)(*xs),
        )


def case_mismatches_are_errors_of_choros_and_of_the_framework() -> None:
    of_framework: dict[str, Callable[[], Any]] = {
        "tensorflow": lambda: framework.errors.FailedPreconditionError,
        "jax": lambda: framework.errors.JaxRuntimeError,
    }
    x = make(np.ones((2 * size(), 2 + hvd.rank()), np.float32))
    functions = {row.function: row.options for row in table().values() if row.static}
    text = rf"(?s)rank 0: \w*{{0}}\(.*, 2\).*rank {size() - 1}: \w*{{0}}\("
    for function, options in functions.items():
        given = functools.partial(_given, function.startswith("grouped"))
        calls = dict(Row(function, concatenated, options, given).variants())
        if FRAMEWORK in of_framework:
            calls["compiled"] = compiled(calls[function])
        for how, call in calls.items():
            with pytest.raises(MismatchError, match=text.format(function)) as caught:
                _finish(call(x))
            if how == "compiled" or FRAMEWORK == "tensorflow":
                assert isinstance(caught.value, of_framework[FRAMEWORK]()), function
            assert hvd.allreduce(hvd.rank(), op=hvd.Sum) == sum(range(size())), f"after {function}, {how}"


def _given(grouped: bool, x: Any, _: int) -> Any:
    return [x, x] if grouped else x


def _finish(results: list[Any]) -> None:
    if FRAMEWORK == "jax":
        framework.block_until_ready(results)


def case_what_is_not_supported_is_an_error() -> None:
    booleans, integers, floats = (make(values(0).astype(each)) for each in (np.bool_, np.int32, np.float32))
    rows = table()
    refused: list[tuple[str, Callable[[Any], Any], Any]] = [
        ("have no average", hvd.allreduce, booleans),
        ("have no average", lambda x: hvd.grouped_allreduce([x]), booleans),
        ("have no average", hvd.reducescatter, booleans),
        ("need numbers, not booleans", lambda x: hvd.allreduce(x, op=hvd.Max, postscale_factor=2.0), booleans),
        ("needs floating-point values, not int32", lambda x: hvd.allreduce(x, op=hvd.Adasum), integers),
        ("needs floating-point values, not bool", lambda x: hvd.grouped_allreduce([x], op=hvd.Adasum), booleans),
        ("op=Adasum combines whole arrays", lambda x: hvd.reducescatter(x, op=hvd.Adasum), floats),
        ("op=Adasum combines whole arrays", lambda x: hvd.grouped_reducescatter([x], op=hvd.Adasum), floats),
    ]
    for row in rows.values():
        numbers = make(values(0).astype(np.complex64))
        refused += [("dtype complex64 cannot be communicated", call, numbers) for _, call in row.variants()]
    others = {
        "torch": lambda: ("torch.float8_e4m3fn", framework.ones(size()).to(framework.float8_e4m3fn)),
        "jax": lambda: ("key_data", framework.random.key(0)),
        "tensorflow": lambda: ("dtype object", framework.constant(["a"] * size())),
        "numpy": lambda: ("dtype <U1", np.array(["a"] * size())),
    }
    text, unknown = others[FRAMEWORK]()
    refused += [(text, call, unknown) for call in (hvd.allreduce, hvd.allgather, hvd.alltoall)]
    for text, call, x in refused:
        with pytest.raises(ConfigError, match=text):
            call(x)
    for row in rows.values() if FRAMEWORK != "numpy" else ():
        if not row.differentiable():
            with pytest.raises(ConfigError, match=r"the gradient of \w+\(op=\w+\) is needed, which has none"):
                _gradient_of(functools.partial(_first_result, row), floats)
    check([hvd.allreduce(floats, op=hvd.Max)], [values(0)], np.dtype(np.float32), "after the errors")


def _first_result(row: Row, x: Any) -> Any:
    return next(row.variants())[1](x)[0]


def _gradient_of(collective: Callable[[Any], Any], x: Any) -> None:
    if FRAMEWORK == "torch":
        collective(x.clone().requires_grad_()).sum().backward()
    elif FRAMEWORK == "jax":
        framework.grad(lambda x: collective(x).sum())(x)
    else:
        with framework.GradientTape() as tape:
            tape.watch(x)
            total = framework.reduce_sum(collective(x))
        tape.gradient(total, x)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
