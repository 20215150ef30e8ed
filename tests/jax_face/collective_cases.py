"""The collectives of ``choros.jax`` under JAX's transformations, against NumPy; see ``parallel/conformance_cases.py``.

Each collective is given twice: as users call it, and as a NumPy function of all ranks' arrays, which returns all ranks'
results. The gradient follows from the latter, because collectives are linear.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from logging.handlers import BufferingHandler
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from numpy.typing import NDArray

import choros.jax as hvd
from choros.arrays import jax_arrays
from choros.arrays.jax_arrays import JaxArrays
from choros.errors import ConfigError, MismatchError

Collective = Callable[[Any], Any]
#: From all ranks' arrays to all ranks' results.
Definition = Callable[[list[NDArray]], list[NDArray]]
SHAPE = (6, 2)


def total(xs: list[NDArray]) -> list[NDArray]:
    return [np.sum(xs, axis=0)] * len(xs)


LINEAR: dict[str, tuple[Collective, Definition]] = {
    "sum": (lambda x: hvd.allreduce(x, hvd.Sum), total),
    "average": (hvd.allreduce, lambda xs: [np.mean(xs, axis=0)] * len(xs)),
    "scaled": (
        lambda x: hvd.allreduce(x, hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        lambda xs: [1.5 * each for each in total(xs)],
    ),
    "tree": (
        lambda x: sum(hvd.allreduce({"a": x, "b": (2 * x, None)}, hvd.Sum)["b"][:1]),
        lambda xs: [2 * each for each in total(xs)],
    ),
    "grouped": (
        lambda x: jnp.concatenate(hvd.grouped_allreduce([x, 3 * x], hvd.Sum)),
        lambda xs: [np.concatenate([each, 3 * each]) for each in total(xs)],
    ),
    "allgather": (hvd.allgather, lambda xs: [np.concatenate(xs)] * len(xs)),
    "grouped allgather": (
        lambda x: sum(hvd.grouped_allgather([x, x[::-1]])),
        lambda xs: [np.concatenate(xs) + np.concatenate([x[::-1] for x in xs])] * len(xs),
    ),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda xs: [xs[1]] * len(xs)),
    "reducescatter": (
        lambda x: hvd.reducescatter(x[:5], hvd.Sum),
        lambda xs: np.array_split(np.sum(xs, axis=0)[:5], len(xs)),
    ),
    "grouped reducescatter": (
        lambda x: jnp.concatenate(hvd.grouped_reducescatter([x, 2 * x])),
        lambda xs: [np.concatenate([each, 2 * each]) for each in np.array_split(np.mean(xs, axis=0), len(xs))],
    ),
    "alltoall": (
        hvd.alltoall,
        lambda xs: [np.concatenate([np.array_split(x, len(xs))[rank] for x in xs]) for rank in range(len(xs))],
    ),
}
OTHERS: dict[str, tuple[Collective, Definition]] = {
    "minimum": (lambda x: hvd.allreduce(x, hvd.Min), lambda xs: [np.min(xs, axis=0)] * len(xs)),
    "maximum": (lambda x: hvd.allreduce(x, hvd.Max), lambda xs: [np.max(xs, axis=0)] * len(xs)),
    "product": (lambda x: hvd.allreduce(x, hvd.Product), lambda xs: [np.prod(xs, axis=0)] * len(xs)),
}


def values(rank: int, *shape: int, seed: int = 0) -> NDArray:
    """Small integers, which are summed without rounding."""
    return np.random.default_rng([rank, seed]).integers(-3, 4, shape).astype(np.float32)


def all_values(*shape: int, seed: int = 0) -> list[NDArray]:
    return [values(rank, *shape, seed=seed) for rank in range(hvd.size())]


def adjoint(definition: Definition, weights: list[NDArray], shape: tuple[int, ...]) -> NDArray:
    """This rank's gradient of the sum over the ranks of ``(result * weights).sum()``."""
    gradient = np.zeros(shape, np.float32)
    for index in np.ndindex(*shape):
        inputs = [np.zeros(shape, np.float32) for _ in weights]
        inputs[hvd.rank()][index] = 1
        results = definition(inputs)
        gradient[index] = sum((each * w).sum() for each, w in zip(results, weights, strict=True))
    return gradient


def directly_and_compiled(function: Collective) -> Iterator[Collective]:
    yield function
    yield jax.jit(function)


def equal(result: Any, expected: NDArray, of: str) -> None:
    assert isinstance(result, jax.Array)
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-6, err_msg=of)


def case_values_of_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_arrays, "_LARGE_BYTES", 0)
    xs, rows = all_values(*SHAPE), LINEAR | OTHERS
    results = jax.jit(lambda x: [collective(x) for collective, _ in rows.values()])(jnp.asarray(xs[hvd.rank()]))
    for result, (of, (_, definition)) in zip(results, rows.items(), strict=True):
        equal(result, definition(xs)[hvd.rank()], of)


def case_calls_with_large_arrays_keep_the_order_of_the_program() -> None:
    adapter, calls = JaxArrays(), []

    def times(x: Any, number: int) -> Any:
        def on_host(hosts: Sequence[NDArray]) -> list[NDArray]:
            assert not hosts[0].flags.writeable
            calls.append(number)
            return [hosts[0] * number]

        return adapter.host_call(on_host, [x], [adapter.spec(x)])[0]

    @jax.jit
    def program(x: Any) -> Any:
        return [times(part, number) for number, part in enumerate((x, x[:2], x + 1, x[:3], x), 1)]

    large = jnp.arange(1 << 18, dtype=jnp.float32)  # 1 MiB
    for _ in range(5):
        parts = (large, large[:2], large + 1, large[:3], large)
        for number, (result, part) in enumerate(zip(program(large), parts, strict=True), 1):
            np.testing.assert_array_equal(result, part * number)
    assert calls == [1, 2, 3, 4, 5] * 5


#: Functions of ``doubled``, which gives each of its arguments twice, and of an array, with which a program goes on.
CONSTANT = np.arange(12, dtype=np.float32).reshape(4, 3)
UPDATES: dict[str, Callable[[Collective, Any], Any]] = {
    "arguments of the program": lambda doubled, x: [*doubled(x), x],
    "values that are still needed": lambda doubled, x: (lambda y: [*doubled(y), y + 1])(x * 3),
    "one value twice": lambda doubled, x: [doubled(x + 1, x + 1), doubled(x, x)],
    "constants": lambda doubled, x: [doubled(jnp.asarray(CONSTANT), x), doubled(jnp.asarray(CONSTANT))],
    "other layouts": lambda doubled, x: doubled(x.T, x[:, ::2], (x + 1).T),
    "scalars and arrays without rows": lambda doubled, x: doubled(x[0, 0], x[:0], x.sum()),
    "bfloat16": lambda doubled, x: doubled(x.astype(jnp.bfloat16), x, x.astype(jnp.int8)),
    "results again": lambda doubled, x: [*doubled(*doubled(*doubled(x, x + 1))), x],
    "carries": lambda doubled, x: jax.lax.scan(lambda y, row: (doubled(y)[0], [*doubled(row), y]), x[0], x),
    "a branch": lambda doubled, x: [jax.lax.cond(x[0, 1] > 0, lambda y: doubled(y)[0], lambda y: y, x), x],
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # results of other shapes
@pytest.mark.parametrize("program", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("donated", [(), (0,)], ids=["", "donated"])
@pytest.mark.parametrize("keeps", [False, True], ids=["", "keeps"])
def case_results_have_the_memory_of_what_they_replace(
    program: Callable[[Collective, Any], Any], donated: tuple[int, ...], keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function writes into the memory of its arguments, unless it keeps them; what is still needed has another."""
    monkeypatch.setattr(jax_arrays, "_LARGE_BYTES", 0)
    adapter, compiled = JaxArrays(), jax.default_backend() == "cpu"

    def double(hosts: Sequence[NDArray], out: Sequence[NDArray] | None) -> list[NDArray]:
        number, *arrays = hosts
        assert (out is not None) is compiled
        assert not number.flags.writeable
        targets = [None] * len(arrays) if out is None else out
        for array, target in zip(arrays, targets, strict=True):
            in_place = target is not None and np.shares_memory(array, target)
            assert in_place is (compiled and not keeps and array.size > 0)
        return [np.multiply(array, number.astype(array.dtype), out=t) for array, t in zip(arrays, targets, strict=True)]

    def doubled(*arrays: Any) -> list[Any]:
        specs = [adapter.spec(each) for each in arrays]
        return adapter.host_call(double, [jnp.int32(2), *arrays], specs, replaced=len(arrays), keeps=keeps)

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    expected = program(lambda *arrays: [2 * each for each in arrays], jnp.asarray(x))
    run = jax.jit(lambda x: program(doubled, x), donate_argnums=donated)
    for _ in range(3):
        given = jnp.array(x)
        jax.tree.map(np.testing.assert_array_equal, run(given), expected)
        if not donated:
            np.testing.assert_array_equal(given, x)


def case_an_array_that_a_call_replaces_is_only_read_outside_of_jit() -> None:
    adapter, x = JaxArrays(), jnp.ones(1 << 19)

    def double(hosts: Sequence[NDArray], out: Sequence[NDArray] | None) -> list[NDArray]:
        assert out is None
        assert not hosts[0].flags.writeable
        return [2 * hosts[0]]

    (result,) = adapter.host_call(double, [x], [adapter.spec(x)], replaced=1)
    assert float(result.min()) == 2
    assert float(x.max()) == 1


def case_values_of_a_batch_are_one_collective() -> None:
    batches = all_values(*SHAPE, 4)  # the last dimension is that of the batch
    own = jnp.asarray(batches[hvd.rank()])
    communicator = hvd.global_process_set.communicator
    for of, (collective, definition) in (LINEAR | OTHERS).items():
        expected = np.stack(
            [definition([batch[..., index] for batch in batches])[hvd.rank()] for index in range(4)], axis=-1
        )
        before = communicator.collectives
        collective(own[..., 0])
        single = communicator.collectives - before
        for function in directly_and_compiled(jax.vmap(collective, in_axes=-1, out_axes=-1)):
            before = communicator.collectives
            equal(function(own), expected, of)
            assert communicator.collectives - before == single, of
    nested = jax.vmap(jax.vmap(hvd.allreduce))  # over both dimensions of the rows
    equal(jax.jit(nested)(own), np.mean(batches, axis=0), "nested")


def case_gradients() -> None:
    x = jnp.asarray(values(hvd.rank(), *SHAPE))
    for of, (collective, definition) in LINEAR.items():
        shapes = [each.shape for each in definition(all_values(*SHAPE))]
        weights = [values(rank, *shape, seed=1) for rank, shape in enumerate(shapes)]
        own = jnp.asarray(weights[hvd.rank()])

        def loss(x: Any, w: Any, collective: Collective = collective) -> Any:
            return (collective(x) * w).sum()

        expected = adjoint(definition, weights, SHAPE)
        equal(jax.grad(jax.jit(loss))(x, own), expected, of)
        batch, many = jnp.stack([x, -x, x]), jnp.stack([own, own, 2 * own])
        for function in directly_and_compiled(jax.vmap(jax.grad(loss))):
            equal(function(batch, many), np.stack([expected, expected, 2 * expected]), of)


def case_second_derivatives() -> None:
    x = jnp.asarray(values(hvd.rank(), 3))

    def square(x: Any) -> Any:
        return (hvd.allreduce(x, hvd.Sum) ** 2).sum()

    for function in directly_and_compiled(jax.grad(lambda x: jax.grad(square)(x).sum())):
        equal(function(x), np.full(3, 2.0 * hvd.size() ** 2), "second derivative")


def case_reductions_without_a_gradient() -> None:
    x = jnp.asarray(values(hvd.rank(), 3))
    for of, (collective, definition) in OTHERS.items():

        def loss(x: Any, collective: Collective = collective) -> Any:
            return (x**2).sum(), collective(x)

        for function in directly_and_compiled(jax.grad(loss, has_aux=True)):
            gradient, metric = function(x)  # that of another result
            equal(gradient, 2 * np.asarray(x), of)
            equal(metric, definition(all_values(3))[hvd.rank()], of)
        with pytest.raises(ConfigError, match=r"the gradient of grouped_allreduce\(op=(Min|Max|Product)\)"):
            jax.grad(lambda x: loss(x)[1].sum())(x)

        def constant(x: Any, collective: Collective = collective) -> Any:
            return (x * collective(jax.lax.stop_gradient(x))).sum()

        equal(jax.jit(jax.grad(constant))(x), definition(all_values(3))[hvd.rank()], of)


def case_loops_conditions_and_donated_arrays() -> None:
    x = values(hvd.rank(), 3)
    mean = np.mean(all_values(3), axis=0)

    def repeated(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (hvd.allreduce(carry) + 1, carry.sum()), x, None, length=3)[0]

    equal(jax.jit(repeated)(x), mean + 3, "scan")
    equal(jax.jit(jax.grad(lambda x: repeated(x).sum()))(x), np.ones(3), "gradient of scan")
    batch = jnp.stack([x, x + 1])
    equal(jax.jit(jax.vmap(repeated))(batch), np.stack([mean + 3, mean + 4]), "vmap of scan")
    branch = jax.jit(lambda x, odd: jax.lax.cond(odd, hvd.allreduce, lambda x: x, x))
    equal(branch(x, True), mean, "cond")
    equal(branch(x, False), x, "cond")
    step = jax.jit(lambda x: hvd.allreduce(x) + 1, donate_argnums=0)
    array = jnp.asarray(x) + 0
    for _ in range(3):
        array = step(array)
    equal(array, mean + 3, "donated")


def case_numbers_and_trees() -> None:
    rank, size = hvd.rank(), hvd.size()
    mean = hvd.allreduce({"rank": rank, "pair": [1.5, jnp.full(2, rank)], "nothing": None})
    assert mean["rank"] == (size - 1) / 2
    assert (mean["pair"][0], mean["nothing"]) == (1.5, None)
    assert hvd.allreduce(rank == 0, hvd.Max)
    assert hvd.allgather(rank).tolist() == list(range(size))
    assert hvd.broadcast((rank, 2 * rank), 1) == (1, 2)
    assert hvd.allreduce([]) == []
    assert hvd.allreduce({"tokens": np.int64(2**30)}, hvd.Max)["tokens"] == 2**30
    for large in (np.int64(3_000_000_000), np.array([2**40, 1])):  # of which JAX keeps 32 bits
        with pytest.raises(ConfigError, match="JAX's int32 cannot hold"):
            hvd.allreduce({"tokens": large}, hvd.Sum)


def case_numbers_in_compiled_functions_belong_to_the_program() -> None:
    """Ranks need not trace equally often: rank 1 does once more."""
    step = jax.jit(lambda x: x.sum() + hvd.allreduce(len(x), hvd.Sum))
    if hvd.rank() == 1:
        step.lower(jnp.ones(7)).compile()
    assert step(jnp.ones(1 + hvd.rank())) == 1 + hvd.rank() + sum(range(1, hvd.size() + 1))


def case_different_numbers_of_rows() -> None:
    rows = [values(rank, rank + 1, 2) for rank in range(hvd.size())]
    equal(hvd.allgather(jnp.asarray(rows[hvd.rank()])), np.concatenate(rows), "allgather")
    received, counts = hvd.alltoall(jnp.full(hvd.size(), hvd.rank()), [1] * hvd.size())
    assert (received.tolist(), counts.tolist()) == (list(range(hvd.size())), [1] * hvd.size())
    with pytest.raises(ConfigError, match="call the collective outside of jit"):
        jax.jit(lambda x: hvd.alltoall(x, [1] * hvd.size()))(jnp.ones(hvd.size()))


@pytest.mark.parametrize("large_bytes", [0, 1 << 20])
def case_different_numbers_of_rows_in_compiled_functions(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of one row must not fill the place of several."""
    monkeypatch.setattr(jax_arrays, "_LARGE_BYTES", large_bytes)
    text = r"returned an array of shape \(1, 2\), and was compiled for \(\d, 2\): there each rank gives as many rows"
    rows = jnp.ones((1 if hvd.rank() == 0 else 0, 2))
    with pytest.raises(MismatchError, match=text):
        jax.block_until_ready(jax.jit(hvd.allgather)(rows))
    if hvd.rank() == 0:
        with pytest.raises(MismatchError, match=text):
            jax.block_until_ready(jax.jit(hvd.allgather)(rows))
    hvd.join()
    equal(jax.jit(hvd.allreduce)(jnp.ones(2)), np.ones(2), "after the mismatch")


def case_adasum_combines_whole_arrays() -> None:
    same = jnp.arange(1.0, 4.0)
    for function in directly_and_compiled(lambda x: hvd.allreduce(x, hvd.Adasum)):
        equal(function(same), np.arange(1.0, 4.0), "adasum")
    with pytest.raises(ConfigError, match=r"op=Adasum .* cannot be used under jax\.vmap"):
        jax.vmap(lambda x: hvd.allreduce(x, hvd.Adasum))(same)


def case_process_sets() -> None:
    ranks = [1] if hvd.size() == 2 else [0, 2]
    some = hvd.add_process_set(ranks)
    if some.included():
        reduced = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, process_set=some))(jnp.asarray(values(hvd.rank(), 2)))
        equal(reduced, sum(values(rank, 2) for rank in ranks), "process set")
    hvd.remove_process_set(some)


def case_mismatches_reach_all_ranks_and_the_next_call_works() -> None:
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name="loss") * 2)
    jaxs = BufferingHandler(1000)
    logging.getLogger("jax._src.callback").addHandler(jaxs)
    for _ in range(2):
        for rows in (5, 1 << 20):  # large arrays are passed in XLA's memory
            with pytest.raises(MismatchError, match=r"shape=\(4,\)") as caught:
                jax.block_until_ready(step(jnp.ones(4 if hvd.rank() == 0 else rows)))
            assert isinstance(caught.value, JaxRuntimeError)
        equal(step(jnp.ones(3)), np.full(3, 2.0 * hvd.size()), "after the mismatch")
        with pytest.raises(MismatchError, match=r"shape=\(4,\)"):
            hvd.allreduce(jnp.ones(4 if hvd.rank() == 0 else 5))
    logging.getLogger("jax._src.callback").removeHandler(jaxs)
    assert jaxs.buffer == []  # the caller has got the error
    with pytest.raises(ConfigError, match="root_rank=9 is not one of the participating ranks"):
        jax.jit(lambda x: hvd.broadcast(x, 9))(jnp.ones(2))
