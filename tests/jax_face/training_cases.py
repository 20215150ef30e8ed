"""``distributed(tx)`` on any number of ranks: training equals one process with the global batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import choros.jax as hvd
from choros.arrays import jax_arrays
from choros.errors import ConfigError, DriftError, MismatchError

optax = pytest.importorskip("optax")

ROOT = Path(__file__).parents[2]
FEATURES = 5
Batch = tuple[NDArray, NDArray]


def clipped_adam() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))


def parameters(seed: int = 0) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"kernel": jax.random.normal(first, (FEATURES, 8)), "bias": jnp.zeros(8)},
        "output": [jax.random.normal(second, (8, 1))],
    }


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["output"][0] - y) ** 2)


def batches(*sizes: int) -> list[Batch]:
    """Batches of the whole job."""
    rng = np.random.default_rng(7)
    pairs = [(rng.normal(size=(size, FEATURES)), rng.normal(size=(size, 1))) for size in sizes]
    return [(x.astype(np.float32), y.astype(np.float32)) for x, y in pairs]


def own_rows(batch: Batch) -> Batch:
    rows = slice(*hvd.shard_range(len(batch[0]), hvd.rank(), hvd.size()))
    return batch[0][rows], batch[1][rows]


def steps_with(tx: Any, **arguments: Any) -> Callable[..., Any]:
    """A step that takes parameters, the optimizer's state and a batch."""

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x, y)
        given = {name: value(x) for name, value in arguments.items()}
        updates, state = tx.update(gradients, state, params, **given)
        return optax.apply_updates(params, updates), state

    return step


def trained(step: Callable[..., Any], tx: Any, data: Sequence[Batch], params: Any = None) -> Any:
    params = parameters() if params is None else params
    state = tx.init(params)
    for x, y in data:
        params, state = step(params, state, x, y)
    return params, state


def by_one_process(tx: Any, data: Sequence[Batch]) -> Any:
    return trained(jax.jit(steps_with(tx)), tx, data)


def assert_same(ours: Any, theirs: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def case_uneven_batches_and_ranks_that_join_early() -> None:
    """Two ranks have one row less than others, or none: of the last batch only rank 0 has its row."""
    data = batches(9, 7, 5, 1, 1)
    reference = by_one_process(clipped_adam(), data)
    for donated in ((), (0, 1)):
        tx = hvd.distributed(clipped_adam())
        step = jax.jit(steps_with(tx, examples=len), donate_argnums=donated)
        params, state = trained(step, tx, [rows for batch in data if len((rows := own_rows(batch))[0])])
        root = hvd.join()
        assert root == 0
        assert_same(hvd.broadcast_parameters((params, state), root_rank=root), reference)


def case_join_before_the_first_batch() -> None:
    data = batches(1, 1, 1)
    tx = hvd.distributed(clipped_adam())
    step = jax.jit(steps_with(tx, examples=len))
    params, state = trained(step, tx, data if hvd.rank() == 1 else [])
    root = hvd.join()
    assert root == 1
    assert_same(hvd.broadcast_parameters((params, state), root), by_one_process(clipped_adam(), data))


def case_join_after_going_on_from_a_plain_state() -> None:
    """Without ``init``; no other transformation has parameters like these."""
    params = {"w": jnp.ones((3, 2)), "scale": np.float32(2.0)}
    plain = optax.adam(0.1)
    tx = hvd.distributed(plain)
    state = plain.init(params)
    for made in range(1 + 2 * hvd.rank()):
        gradients = jax.tree.map(lambda each, made=made: jnp.full_like(each, made + 1), params)
        updates, state = jax.jit(tx.update)(gradients, state, params)
        params = optax.apply_updates(params, updates)
    params, state = hvd.broadcast_parameters((params, state), root_rank=hvd.join())
    assert state[0].count == 3


def case_a_batch_without_rows_counts_nowhere() -> None:
    data = batches(4, 1, 4)
    tx = hvd.distributed(clipped_adam())

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any, count: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x, y)
        updates, state = tx.update(gradients, state, params, examples=count)
        return optax.apply_updates(params, updates), state

    params = parameters()
    state = tx.init(params)
    for batch in data:
        x, y = own_rows(batch)
        count = len(x)
        if not count:
            x, y = np.zeros((1, FEATURES), np.float32), np.zeros((1, 1), np.float32)
        params, state = step(params, state, x, y, count)
    assert_same((params, state), by_one_process(clipped_adam(), data))


def case_not_compiled_and_arguments_that_do_not_change_the_result() -> None:
    data = batches(6, 6, 6)
    reference = by_one_process(clipped_adam(), data)
    for arguments in ({}, {"groups": 2}, {"gradient_predivide_factor": 3.0}, {"name": "first"}):
        tx = hvd.distributed(clipped_adam(), **arguments)
        assert_same(trained(steps_with(tx), tx, [own_rows(batch) for batch in data]), reference)


def case_scan_over_steps() -> None:
    data = batches(6, 6, 6)
    tx = hvd.distributed(clipped_adam())
    step = steps_with(tx)

    @jax.jit
    def epoch(params: Any, state: Any, xs: Any, ys: Any) -> Any:
        return jax.lax.scan(lambda carry, batch: (step(*carry, *batch), None), (params, state), (xs, ys))[0]

    xs, ys = (np.stack(each) for each in zip(*map(own_rows, data), strict=True))
    params = parameters()
    assert_same(epoch(params, tx.init(params), xs, ys), by_one_process(clipped_adam(), data))


def case_sum_and_compression() -> None:
    data = batches(6, 6)
    tx = hvd.distributed(optax.sgd(0.1 / hvd.size()), op=hvd.Sum)
    own = [own_rows(batch) for batch in data]
    assert_same(trained(jax.jit(steps_with(tx)), tx, own)[0], by_one_process(optax.sgd(0.1), data)[0])
    tx = hvd.distributed(clipped_adam(), compression=hvd.Compression.fp16)
    before = hvd.global_process_set.communicator.bytes_sent
    assert_same(trained(jax.jit(steps_with(tx)), tx, own), by_one_process(clipped_adam(), data), tolerance=5e-2)
    assert hvd.global_process_set.communicator.bytes_sent - before == 2 * 2 * (FEATURES * 8 + 8 + 8)


def case_micro_batches() -> None:
    uneven, even = batches(7, 5, 3, 9), batches(6, 6, 12, 12)
    for data, around in ((uneven, False), (even, True)):
        reference = by_one_process(optax.MultiSteps(clipped_adam(), 2), data)
        inner = hvd.distributed(clipped_adam())
        tx = optax.MultiSteps(inner, 2) if around else hvd.distributed(optax.MultiSteps(clipped_adam(), 2))
        step = jax.jit(steps_with(tx) if around else steps_with(tx, examples=len))
        params, state = trained(step, tx, [own_rows(batch) for batch in data])
        assert_same(params, reference[0])
        assert_same(state.inner_opt_state, reference[1].inner_opt_state)


def case_gradients_in_the_memory_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are passed."""
    monkeypatch.setattr(jax_arrays, "_LARGE_BYTES", 0)
    case_uneven_batches_and_ranks_that_join_early()
    case_a_batch_without_rows_counts_nowhere()
    case_scan_over_steps()
    case_sum_and_compression()
    case_micro_batches()
    case_several_models_by_vmap()


def case_a_step_that_is_not_finite_on_one_rank() -> None:
    """All leave it out."""
    tx = hvd.distributed(optax.apply_if_finite(optax.sgd(1.0), 3))
    params = {"w": jnp.ones(2)}
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient, expected in ((jnp.nan if hvd.rank() == 1 else 1.0, 0.0), (1.0, -1.0)):
        updates, state = update({"w": jnp.full(2, gradient)}, state, params)
        assert updates["w"].tolist() == [expected] * 2
    assert state.total_notfinite == 1


def case_several_models_by_vmap() -> None:
    data = batches(7, 5)
    tx = hvd.distributed(clipped_adam())
    step = steps_with(tx, examples=len)
    seeds = [0, 1, 2]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(parameters, seeds))
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(step, in_axes=(0, 0, None, None)))
    for batch in data:
        params, state = step(params, state, *own_rows(batch))
    plain = clipped_adam()
    for index, seed in enumerate(seeds):
        expected, _ = trained(jax.jit(steps_with(plain)), plain, data, parameters(seed))
        assert_same(jax.tree.map(lambda leaf, index=index: leaf[index], params), expected)
    with pytest.raises(ConfigError, match=r"examples=…\) cannot differ between the models"):
        jax.vmap(lambda params, count: tx.update(params, tx.init(params), examples=count))(params, jnp.arange(3))


def case_loss_over_the_rows_of_all_ranks() -> None:
    """A contrastive loss: each rank has the terms of its own rows, whose other factors are all ranks' rows."""
    data = batches(6, 6)

    def loss(params: Any, x: Any, gather: Callable[[Any], Any]) -> Any:
        hidden = jnp.tanh(x @ params["hidden"]["kernel"])
        return jnp.mean(jnp.sin(hidden @ gather(hidden).T))

    def train(tx: Any, rows: Sequence[Any], gather: Callable[[Any], Any]) -> Any:
        params = parameters()
        state = tx.init(params)
        for x in rows:
            gradients = jax.jit(jax.grad(lambda params, x: loss(params, x, gather)))(params, x)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params

    ours = train(hvd.distributed(clipped_adam()), [own_rows(batch)[0] for batch in data], hvd.allgather)
    assert_same(ours, train(clipped_adam(), [x for x, _ in data], lambda x: x))


def case_ranks_with_different_parameters() -> None:
    own = [own_rows(batch) for batch in batches(6, 6)]
    params = parameters(seed=hvd.rank())
    for compiled in (True, False):
        tx = hvd.distributed(clipped_adam())
        step = jax.jit(steps_with(tx)) if compiled else steps_with(tx)
        text = r"before step 2, ranks have different values of 2 of 3 .*\['.*broadcast_parameters"
        with pytest.raises(DriftError, match=text):
            jax.block_until_ready(trained(step, tx, own, params))
    tx = hvd.distributed(clipped_adam())
    same = hvd.broadcast_parameters(params, root_rank=1)
    assert_same(same, parameters(seed=1))
    trained(jax.jit(steps_with(tx)), tx, own, same)


def case_ranks_with_different_gradients_and_wrong_arguments() -> None:
    tx = hvd.distributed(optax.sgd(0.1))
    params = {"w": jnp.ones(2 + hvd.rank())}
    update = jax.jit(lambda params: tx.update(params, tx.init(params), params)[0])
    with pytest.raises(MismatchError, match=r"float32\[2\]"):
        jax.block_until_ready(update(params))
    params = {"w": jnp.ones(2)}
    for wrong in (0.5, jnp.ones(2, jnp.int32)):
        with pytest.raises(ConfigError, match="must be the number of examples in the batch, an integer"):
            tx.update(params, tx.init(params), params, examples=wrong)
    with pytest.raises(ConfigError, match="can be reduced with Average or Sum only"):
        hvd.distributed(optax.sgd(0.1), op=hvd.Max)
    with pytest.raises(ConfigError, match="takes an optax transformation, not <function adam"):
        hvd.distributed(optax.adam)
    with pytest.raises(ConfigError, match="groups=-1 must be 0 or more"):
        hvd.distributed(optax.sgd(0.1), groups=-1)


class Moments(NamedTuple):
    count: int
    mean: Any


def case_broadcast_of_any_tree() -> None:
    rank = hvd.rank()
    tree = {
        "layers": [jnp.full((2, 2), rank, jnp.bfloat16), np.full(3, float(rank))],
        "moments": Moments(rank, (jnp.arange(2) + rank, np.float64(rank + 0.1), rank == 0)),
        "activation": jax.nn.relu,
        "name": f"rank {rank}",
        "key": jax.random.key(rank),
        "nothing": None,
        "rate": rank + 0.1,
        "complex": [
            jnp.full((2, 3), rank + 2j),
            np.full((), rank - 1j),
            complex(rank, 3),
            np.zeros((0, 2), np.complex64),
        ],
    }
    received = hvd.broadcast_parameters(tree, root_rank=1)
    assert jax.tree.structure(received) == jax.tree.structure(tree)
    assert received["layers"][0].tolist() == [[1, 1], [1, 1]]
    assert received["layers"][0].dtype == jnp.bfloat16
    assert (received["layers"][1].tolist(), received["layers"][1].dtype) == ([1.0, 1.0, 1.0], np.float64)
    count, (array, number, flag) = received["moments"]
    assert (count, array.tolist(), number, flag) == (1, [1, 2], 1.1, False)
    assert (type(count), type(number), type(flag)) == (int, np.float64, bool)
    assert (received["activation"], received["name"], received["rate"]) == (jax.nn.relu, f"rank {rank}", 1.1)
    matrix, scalar, number, none = received["complex"]
    assert (matrix.tolist(), matrix.dtype) == ([[1 + 2j] * 3] * 2, np.complex64)
    assert (scalar.shape, scalar.dtype, scalar, number) == ((), np.complex128, 1 - 1j, 1 + 3j)
    assert (none.shape, none.dtype) == ((0, 2), np.complex64)
    assert jax.random.normal(received["key"]) == jax.random.normal(jax.random.key(1))
    with pytest.raises(ConfigError, match=r"broadcast_parameters was called inside jax\.jit"):
        jax.jit(hvd.broadcast_parameters)(jnp.ones(2))


def case_objects() -> None:
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    hvd.barrier()


def train_nnx(model: Any, tx: Any, data: Sequence[Batch]) -> Any:
    from flax import nnx

    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        gradients = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        optimizer.update(model, gradients, examples=len(x))

    for x, y in data:
        step(model, optimizer, x, y)
    return nnx.state(model, nnx.Param)


def train_equinox(model: Any, tx: Any, data: Sequence[Batch], **examples: Any) -> Any:
    import equinox as eqx

    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = eqx.filter_grad(lambda model: jnp.mean((jax.vmap(model)(x) - y) ** 2))(model)
        given = {name: value(x) for name, value in examples.items()}
        updates, state = tx.update(gradients, state, model, **given)
        return eqx.apply_updates(model, updates), state

    for x, y in data:
        model, state = step(model, state, x, y)
    return eqx.filter(model, eqx.is_array)


def case_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    data = batches(5, 3, 4)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.hidden = nnx.Linear(FEATURES, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.0, rngs=rngs)
            self.output = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.output(self.dropout(self.norm(nnx.tanh(self.hidden(x)))))

    model = Model(nnx.Rngs(hvd.rank()))
    nnx.update(model, hvd.broadcast_parameters(nnx.state(model), root_rank=1))
    ours = train_nnx(model, hvd.distributed(clipped_adam()), [own_rows(batch) for batch in data])
    plain = optax.with_extra_args_support(clipped_adam())
    assert_same(ours, train_nnx(Model(nnx.Rngs(1)), plain, data))
    assert_same(nnx.state(hvd.broadcast_parameters(model), nnx.Param), ours)


def case_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    data = batches(5, 3, 4)

    def make(seed: int) -> Any:
        return eqx.nn.MLP(FEATURES, 1, 8, 2, activation=jnp.tanh, key=jax.random.key(seed))

    model = hvd.broadcast_parameters(make(hvd.rank()), root_rank=1)
    assert model.activation is not None
    ours = train_equinox(model, hvd.distributed(optax.adam(0.05)), [own_rows(batch) for batch in data], examples=len)
    assert_same(ours, train_equinox(make(1), optax.adam(0.05), data))


def case_documented_programs() -> None:
    pytest.importorskip("flax.nnx")
    pytest.importorskip("equinox")
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jax.md").read_text(), re.DOTALL)
    assert len(programs) == 4
    namespace: dict[str, Any] = {}
    for number, program in enumerate(programs):
        exec(compile(program, f"docs/jax.md, program {number}", "exec"), namespace)
        trained = namespace["model" if number else "params"]
        arrays = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(trained) if isinstance(leaf, jax.Array)]
        assert len({str(each) for each in hvd.allgather_object(arrays)}) == 1
    assert namespace["metrics"]["rows"] == sum(8 + rank for rank in range(hvd.size()))
    assert len(namespace["rows"]) == sum(range(1, hvd.size() + 1))
