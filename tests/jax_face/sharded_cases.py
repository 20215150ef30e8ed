"""``distributed(tx, shard_state=True)`` on 2 and 3 ranks: the same parameters as without it, and states of one process.

Transformations are compared with themselves unsharded, bit for bit where they work item by item, and with plain optax
given the mean gradient. XLA may round ``p - rate * u`` once, which it cannot where ``rate * u`` comes from other ranks:
so bits are compared of updates that are compiled without the sum.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import choros.jax as hvd
from choros.arrays import jax_arrays
from choros.errors import ConfigError, MismatchError
from choros.jax.division import SlicedState
from jax_face.training_cases import (
    assert_same,
    batches,
    by_one_process,
    own_rows,
    parameters,
    steps_with,
    train_equinox,
    train_nnx,
    trained,
)

optax = pytest.importorskip("optax")

STEPS = 20
#: No number of ranks divides them, and each rank has items of several: XLA compiles a single array in another way.
SHAPES: dict[str, tuple[int, ...]] = {
    "a": (7, 33),
    "b": (33,),
    "c": (13, 17),
    "d": (17,),
    "e": (3, 3, 4, 5),
    "f": (),
    "g": (11, 17),
    "h": (1,),
    "i": (29, 5),
}
BY_ITEM: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.02, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01, mask=lambda params: jax.tree.map(lambda each: each.ndim > 1, params)),
    "adamax": lambda: optax.adamax(0.01),
    "nadam": lambda: optax.nadam(0.01),
    "rmsprop": lambda: optax.rmsprop(0.003, momentum=0.5, centered=True),
    "adagrad": lambda: optax.adagrad(0.05),
    "adadelta": lambda: optax.adadelta(0.5),
    "lion": lambda: optax.lion(0.003),
}
COMPOSED_BY_ITEM: dict[str, Callable[[], Any]] = {
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.01, 5, 30)),
    "masked": lambda: optax.masked(optax.adam(0.01), {name: name not in "be" for name in SHAPES}),
    "labels": lambda: optax.partition(
        {"fast": optax.adam(0.01), "slow": optax.sgd(0.001), "frozen": optax.set_to_zero()},
        {name: "fast" if name in "acdgh" else "frozen" if name == "e" else "slow" for name in SHAPES},
    ),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "micro-batches": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "moving average": lambda: optax.chain(optax.clip(0.8), optax.adam(0.01), optax.ema(0.8)),
}
BY_ARRAY: dict[str, Callable[[], Any]] = {
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=8),
    "clip by array": lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.adamw(0.01)),
    "large arrays": lambda: optax.adamw(0.01, mask=lambda params: jax.tree.map(lambda each: each.size > 99, params)),
}
if hasattr(optax.contrib, "muon"):
    BY_ARRAY["muon"] = lambda: optax.contrib.muon(0.01)


def random_tree(*seed: int, scale: float = 1.0) -> Any:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(scale * generator.normal(size=shape), np.float32) for name, shape in SHAPES.items()}


def after_steps(tx: Any, gradients: Callable[[int], Any], state: Any = None, first: int = 0) -> Any:
    """The parameters, updates and state after all steps."""
    params = jax.tree.map(jnp.asarray, random_tree(1))
    state = tx.init(params) if state is None else state
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    for step in range(first, first + STEPS):
        updates, state = update(gradients(step), state, params)
        params = apply(params, updates)
    return params, updates, state


@functools.cache
def gradients_of(step: int, rank: int) -> Any:
    """Numbers of which sums are exact: with three ranks a reducescatter may add them in another order."""
    tree = random_tree(step, rank, scale=10.0 ** (step % 3 - 1))
    return jax.tree.map(lambda each: jnp.asarray(np.round(each * 256) / 256), tree)


def own_gradients(step: int) -> Any:
    return gradients_of(step, hvd.rank())


@functools.cache
def mean_gradients(step: int) -> Any:
    every = [gradients_of(step, rank) for rank in range(hvd.size())]
    return jax.tree.map(lambda *each: jnp.asarray(np.mean(each, axis=0)), *every)


def assert_identical(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))


def assert_same_on_all_ranks(tree: Any) -> None:
    values = hvd.allgather_object([np.asarray(each).tobytes() for each in jax.tree.leaves(tree)])
    assert all(each == values[0] for each in values)


def case_item_by_item_the_bits_of_the_unsharded_transformation() -> None:
    assert_the_bits_of_the_unsharded(BY_ITEM)


def case_item_by_item_the_bits_of_composed_transformations() -> None:
    assert_the_bits_of_the_unsharded(COMPOSED_BY_ITEM)


def assert_the_bits_of_the_unsharded(transformations: dict[str, Callable[[], Any]]) -> None:
    for name, create in transformations.items():
        tx = hvd.distributed(create(), shard_state=True)
        params, updates, state = after_steps(tx, own_gradients)
        assert state.division.by_item, name
        assert_same_on_all_ranks((params, updates))
        unsharded = after_steps(hvd.distributed(create()), own_gradients)
        assert_identical((params, updates), unsharded[:2])
        assert_identical(hvd.whole_state(tx, state, params), unsharded[2])
        assert_same(params, after_steps(_plain(create()), mean_gradients)[0], tolerance=1e-4)


def case_array_by_array() -> None:
    for name, create in BY_ARRAY.items():
        tx = hvd.distributed(create(), shard_state=True)
        params, updates, state = after_steps(tx, own_gradients)
        assert not state.division.by_item, name
        assert_same_on_all_ranks((params, updates))
        expected, _, whole = after_steps(hvd.distributed(create()), own_gradients)
        assert_same(params, expected, tolerance=1e-4)
        assert_same(hvd.whole_state(tx, state, params), whole, tolerance=1e-3)
        assert_same(params, after_steps(_plain(create()), mean_gradients)[0], tolerance=1e-4)


def _plain(tx: Any) -> Any:
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


def case_transformations_that_use_the_shapes_of_arrays() -> None:
    """Of an array whose last dimension is 1, an even slice would have another one."""
    of_each: dict[str, Callable[[Any], Any]] = {
        "width": lambda each: each / each.shape[-1],
        "a table of sizes": lambda each: each * jnp.asarray([1.0, each.size])[1],
        "a row": lambda each: each * (2.0 if each.shape[-1] == 1 else 1.0),
    }
    params = {"w": jnp.ones((300, 1)), "b": jnp.ones(1)}
    for name, function in of_each.items():
        plain = optax.stateless(lambda updates, _, function=function: jax.tree.map(function, updates))
        tx = hvd.distributed(plain, shard_state=True)
        updates, state = tx.update(params, tx.init(params), params)
        assert not state.division.by_item, name
        assert_same(updates, plain.update(params, plain.init(params), params)[0])


def case_hyperparameters_in_a_dtype_of_all_parameters() -> None:
    """Of which some ranks have those of bfloat16 only."""
    dtypes = {"a": jnp.bfloat16, "b": jnp.bfloat16, "c": jnp.float32, "d": jnp.float32}
    params = {name: jnp.full(200, 0.5, dtype) for name, dtype in dtypes.items()}
    create = optax.inject_hyperparams(optax.adam)
    with pytest.raises(ConfigError, match=r"optax.inject_hyperparams has hyperparam_dtype=…"):
        hvd.distributed(create(0.1), shard_state=True).init(params)
    plain = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(0.1)
    tx = hvd.distributed(plain, shard_state=True)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    expected, whole = jax.jit(plain.update)(params, plain.init(params), params)
    assert_identical((updates, hvd.whole_state(tx, state, params)), (expected, whole))


def case_each_rank_has_its_share_of_the_state() -> None:
    params = {"table": jnp.ones((1000, 32)), "kernel": jnp.ones((200, 100)), "bias": jnp.ones(100)}
    state = hvd.distributed(optax.adam(0.1), shard_state=True).init(params)
    total = sum(each.nbytes for each in jax.tree.leaves(optax.adam(0.1).init(params)))
    own = sum(each.nbytes for each in jax.tree.leaves(state))
    assert abs(own * hvd.size() / total - 1) < 0.01
    assert sum(hvd.allgather_object(own)) == total + 4 * (hvd.size() - 1)  # each has the count


def case_clipping_by_the_global_norm() -> None:
    def clipped(clip: Callable[[float], Any]) -> Any:
        return optax.chain(clip(1.0), optax.adamw(0.01))

    ours = after_steps(hvd.distributed(clipped(hvd.clip_by_global_norm), shard_state=True), own_gradients)
    assert ours[2].division.by_item
    assert_same_on_all_ranks(ours[0])
    assert_same(ours[0], after_steps(clipped(optax.clip_by_global_norm), mean_gradients)[0])
    theirs = after_steps(hvd.distributed(clipped(optax.clip_by_global_norm)), own_gradients)
    assert_identical(after_steps(hvd.distributed(clipped(hvd.clip_by_global_norm)), own_gradients), theirs)
    one = {"only": jnp.full(3, 2.0)}  # ranks without items know the norm, too
    tx = hvd.distributed(optax.chain(hvd.clip_by_global_norm(1.0), optax.lamb(0.1)), shard_state=True)
    updates, _ = jax.jit(tx.update)(one, tx.init(one), one)
    expected, _ = optax.lamb(0.1).update({"only": jnp.full(3, 3**-0.5)}, optax.lamb(0.1).init(one), one)
    assert_same(updates, expected)
    with jax.enable_x64(True):
        one = {"only": jnp.zeros(1)}
        tx = hvd.distributed(optax.chain(hvd.clip_by_global_norm(1.0), optax.sgd(1.0)), shard_state=True)
        updates, _ = tx.update({"only": jnp.array([3.0])}, tx.init(one), one)
        assert (updates["only"].dtype, float(updates["only"][0])) == ("float64", -1.0)


def clipped_adam(clip: Any = None) -> Any:
    return optax.chain((clip or optax.clip_by_global_norm)(0.1), optax.adam(0.05))


def sharded_adam(**arguments: Any) -> Any:
    return hvd.distributed(clipped_adam(hvd.clip_by_global_norm), shard_state=True, **arguments)


def case_uneven_batches() -> None:
    data = batches(9, 7, 5, 8)
    reference = by_one_process(clipped_adam(), data)
    for donated in ((), (0, 1)):
        tx = sharded_adam()
        step = jax.jit(steps_with(tx, examples=len), donate_argnums=donated)
        params, state = trained(step, tx, [own_rows(batch) for batch in data])
        assert_same_on_all_ranks(params)
        assert hvd.join() in range(hvd.size())  # all at once
        assert_same((params, hvd.whole_state(tx, state, params)), reference)


def case_a_batch_without_rows_counts_nowhere() -> None:
    data = batches(4, 1, 4)
    tx = sharded_adam()

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any, count: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean((x @ params["w"] - y) ** 2))(params)
        updates, state = tx.update(gradients, state, params, examples=count)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((5, 1)), "unused": jnp.ones((2, 2))}
    state = tx.init(params)
    for batch in data:
        x, y = own_rows(batch)
        count = len(x)
        if not count:
            x, y = np.full((1, 5), np.nan, np.float32), np.zeros((1, 1), np.float32)
        params, state = step(params, state, x, y, count)
    assert np.isfinite(params["w"]).all()
    assert_same_on_all_ranks(params)


def case_scan_and_a_step_that_is_not_compiled() -> None:
    data = batches(6, 6, 6)
    reference = by_one_process(clipped_adam(), data)
    tx = sharded_adam(name="scanned")
    step = steps_with(tx)

    @jax.jit
    def epoch(params: Any, state: Any, xs: Any, ys: Any) -> Any:
        return jax.lax.scan(lambda carry, batch: (step(*carry, *batch), None), (params, state), (xs, ys))[0]

    xs, ys = (np.stack(each) for each in zip(*map(own_rows, data), strict=True))
    params = parameters()
    params, state = epoch(params, jax.jit(tx.init)(params), xs, ys)
    assert_same((params, hvd.whole_state(tx, state, params)), reference)
    tx = sharded_adam()
    params, state = trained(steps_with(tx), tx, [own_rows(batch) for batch in data])
    assert_same((params, hvd.whole_state(tx, state, params)), reference)


def case_gradients_in_the_memory_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are passed."""
    monkeypatch.setattr(jax_arrays, "_LARGE_BYTES", 0)
    case_uneven_batches()
    case_a_batch_without_rows_counts_nowhere()
    case_scan_and_a_step_that_is_not_compiled()
    case_several_models_by_vmap()


def case_sum_and_compression() -> None:
    data = [own_rows(batch) for batch in batches(6, 6)]
    for arguments in (
        {"op": hvd.Sum},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"gradient_predivide_factor": 3.0},
        {"groups": 2},
    ):
        tx = hvd.distributed(optax.adam(0.05), shard_state=True, **arguments)
        plain = hvd.distributed(optax.adam(0.05), **arguments)
        ours, theirs = (trained(jax.jit(steps_with(each)), each, data)[0] for each in (tx, plain))
        assert_same(ours, theirs, tolerance=1e-3 if "compression" in arguments else 2e-5)


def case_micro_batches_around_it() -> None:
    data = batches(6, 6, 12, 12)
    params, _ = by_one_process(optax.MultiSteps(clipped_adam(), 2), data)
    tx = optax.MultiSteps(sharded_adam(), 2)
    ours, state = trained(jax.jit(steps_with(tx)), tx, [own_rows(batch) for batch in data])
    assert_same(ours, params)
    assert isinstance(state.inner_opt_state, SlicedState)


def case_several_models_by_vmap() -> None:
    data = batches(7, 5)
    tx = sharded_adam()
    seeds = [0, 1, 2]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(parameters, seeds))
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(steps_with(tx, examples=len), in_axes=(0, 0, None, None)))
    for batch in data:
        params, state = step(params, state, *own_rows(batch))
    assert_same_on_all_ranks(params)
    plain = clipped_adam()
    for index, seed in enumerate(seeds):
        expected, _ = trained(jax.jit(steps_with(plain)), plain, data, parameters(seed))
        assert_same(jax.tree.map(lambda leaf, index=index: leaf[index], params), expected)


def case_more_ranks_than_arrays() -> None:
    params = {"one": jnp.ones((3, 4))}
    for create in (optax.lamb, optax.adam):
        tx = hvd.distributed(create(0.1), shard_state=True)
        step = jax.jit(lambda params, state, tx=tx: tx.update(params, state, params))
        updates, state = step(params, tx.init(params))
        assert_same(updates, create(0.1).update(params, create(0.1).init(params), params)[0])
        whole = hvd.whole_state(tx, state, params)
        assert_same(hvd.own_state(tx, whole, params), state)


def case_leaves_that_are_not_trained_and_other_dtypes() -> None:
    params = {"w": jnp.ones((5, 3), jnp.bfloat16), "n": jnp.arange(3), "x": np.ones(4, np.float32), "none": None}
    gradients = {"w": jnp.full((5, 3), 0.5, jnp.float32), "n": jnp.zeros(3, jnp.int32), "x": jnp.ones(4), "none": None}
    plain, tx = optax.sgd(1.0, momentum=0.5), hvd.distributed(optax.sgd(1.0, momentum=0.5), shard_state=True)
    state, expected = tx.init(params), plain.init(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(gradients, state, params)
        theirs, expected = jax.jit(plain.update)(gradients, expected, params)
    assert_same(updates, theirs)
    assert jax.tree.map(lambda each: each.dtype, updates) == jax.tree.map(lambda each: each.dtype, theirs)


def case_the_state_of_even_slices_on_other_numbers_of_ranks() -> None:
    check_files([*BY_ITEM.values()][:7])


def case_the_state_of_other_even_slices_on_other_numbers_of_ranks() -> None:
    check_files([*BY_ITEM.values()][7:])


def case_the_state_of_whole_arrays_on_other_numbers_of_ranks() -> None:
    check_files(BY_ARRAY.values())


def check_files(creates: Iterable[Callable[[], Any]]) -> None:
    """The state is saved on all ranks, and loaded on all, on fewer, and in plain optax."""
    fewer = [hvd.add_process_set([*range(number)]) for number in range(1, hvd.size())]
    for create in creates:
        tx = hvd.distributed(create(), shard_state=True)
        params, _, state = after_steps(tx, mean_gradients)
        saved = pickle.dumps(hvd.whole_state(tx, state, params))
        expected, *_ = after_steps(tx, mean_gradients, state, first=STEPS)
        assert_identical(hvd.own_state(tx, pickle.loads(saved), params), state)
        others = [(_plain(create()), pickle.loads(saved))]
        for process_set in fewer:
            if process_set.included():
                other = hvd.distributed(create(), shard_state=True, process_set=process_set)
                others.append((other, hvd.own_state(other, pickle.loads(saved), params)))
        for other, loaded in others:
            assert_same(after_steps(other, mean_gradients, loaded, first=STEPS)[0], expected, tolerance=1e-4)
    hvd.barrier()
    for process_set in fewer:
        hvd.remove_process_set(process_set)


def case_a_rank_that_joins_has_no_updates() -> None:
    params = {"w": jnp.ones(8)}
    tx = sharded_adam()
    state = tx.init(params)
    advice = "give every rank a batch"
    if hvd.rank() == 0:
        with pytest.raises(MismatchError, match=advice):
            hvd.join()
    else:
        with pytest.raises(MismatchError, match=advice):
            jax.block_until_ready(jax.jit(tx.update)(params, state, params))
    jax.block_until_ready(jax.jit(tx.update)(params, state, params))


def case_transformations_that_need_all_parameters() -> None:
    params = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
    refused = {
        "['a'] and ['b'].*choros.jax.clip_by_global_norm": clipped_adam(),
        "depends on": optax.apply_if_finite(optax.adam(0.1), 3),
        "random numbers": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
        "skipped": optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
        "missing 1 required keyword-only argument: 'value'": optax.contrib.reduce_on_plateau(),
    }
    for text, tx in refused.items():
        match = text.replace("[", r"\[") if text != "skipped" else "each rank has some of the parameters only"
        with pytest.raises(ConfigError, match=match):
            hvd.distributed(tx, shard_state=True).init(params)
    of_tree = optax.stateless(lambda updates, _: jax.tree.map(jnp.add, updates, params))
    with pytest.raises(ConfigError, match=r"optax.MaskedNode\(\) for parameters of which a rank has no part"):
        hvd.distributed(of_tree, shard_state=True).init(params)

    def numbered(updates: Any, _: Any) -> Any:
        leaves, structure = jax.tree.flatten(updates)
        return structure.unflatten([0.5**index * each for index, each in enumerate(leaves)])

    for differs in (
        numbered,
        lambda updates, _: jax.tree.map(lambda each: each / len(jax.tree.leaves(updates)), updates),
        lambda updates, _: jax.tree.map(lambda each: each / sum(x.size for x in jax.tree.leaves(updates)), updates),
        lambda updates, _: jax.tree.map(lambda each: each * np.random.default_rng().random(), updates),
    ):
        with pytest.raises(ConfigError, match="is another one without some of the other parameters"):
            hvd.distributed(optax.chain(optax.stateless(differs), optax.sgd(0.1)), shard_state=True).init(params)
    one = optax.partition({"far": optax.contrib.dog(1.0), "near": optax.sgd(0.1)}, {"a": "near", "b": "far"})
    with pytest.raises(ConfigError, match=r"the state .inner_states\['far'\].* is another one without some"):
        hvd.distributed(one, shard_state=True).init(params)
    of_leaves = optax.GradientTransformation(jax.tree.leaves, lambda updates, state, _: (updates, state))
    with pytest.raises(ConfigError, match="do not tell to which parameter"):
        hvd.distributed(of_leaves, shard_state=True).init(params)
    with pytest.raises(ConfigError, match="can be reduced with Average or Sum only"):
        hvd.distributed(optax.adam(0.1), shard_state=True, op=hvd.Max)


def case_arrays_without_items_and_numbers_of_numpy() -> None:
    params = {"w": jnp.ones((7, 3)), "none": jnp.zeros((0, 4)), "scale": np.float32(2.0)}
    for plain in (optax.adam(0.1), optax.novograd(0.1)):  # of which one has a number for each array
        tx = hvd.distributed(plain, shard_state=True)
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        expected, whole = jax.jit(plain.update)(params, plain.init(params), params)
        assert_same(updates, expected)
        assert_same(hvd.whole_state(tx, state, params), whole)
        assert_same(hvd.own_state(tx, whole, params), state)


def case_what_a_state_of_slices_is_not_for() -> None:
    params = {"a": jnp.ones(30), "b": jnp.ones((2, 2))}
    tx = hvd.distributed(optax.adam(0.1), shard_state=True)
    state = tx.init(params)
    for collective in (hvd.broadcast_parameters, hvd.allreduce, hvd.broadcast, hvd.allgather):
        with pytest.raises(ConfigError, match="each rank has its own slices"):
            collective((params, state))
    plain = optax.adam(0.1).init(params)
    with pytest.raises(ConfigError, match=r"expected was the state of rank \d of \d, and given that of one process"):
        tx.update(params, plain, params)
    with pytest.raises(ConfigError, match="expected was the state of one process, and given that of slices"):
        hvd.distributed(optax.adam(0.1)).update(params, state, params)
    other = {"a": jnp.ones(31), "b": jnp.ones((2, 2))}
    with pytest.raises(ConfigError, match=r"shapes \[\(30,\), \(2, 2\)\], and given were arrays of \[\(31,\)"):
        tx.update(other, state, other)
    for lacking in (None, jnp.zeros((2, 2), jnp.int32)):
        with pytest.raises(ConfigError, match=r"and given were arrays of \[\(30,\)\]"):
            tx.update({"a": jnp.ones(30), "b": lacking}, state, params)
    with pytest.raises(ConfigError, match=r"arguments for the transformation can be numbers only"):
        tx.update(params, state, params, value_fn=lambda params: 0.0)
    with pytest.raises(ConfigError, match=r"whole_state was called inside jax\.jit"):
        jax.jit(lambda state: hvd.whole_state(tx, state, params))(state)
    with pytest.raises(ConfigError, match="expected was what distributed"):
        hvd.whole_state(optax.adam(0.1), state, params)
    with pytest.raises(ConfigError, match=r"and given were arrays of \[\(6, 5\), \(4,\)\]"):
        hvd.whole_state(tx, state, {"a": jnp.ones((6, 5)), "b": jnp.ones(4)})
    with pytest.raises(ConfigError, match="another state than that of one process"):
        hvd.own_state(tx, optax.sgd(0.1, momentum=0.9).init(params), params)
    with pytest.raises(ConfigError, match="own_state was given a state of"):
        hvd.own_state(tx, state, params)


def case_ranks_outside_of_the_process_set_train_alone() -> None:
    process_set = hvd.add_process_set([0])
    tx = hvd.distributed(optax.adam(0.1), shard_state=True, process_set=process_set)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    assert_same(state, optax.adam(0.1).init(params))
    updates, _ = tx.update(params, state, params)
    assert_same(updates, optax.adam(0.1).update(params, state, params)[0])
    assert_same(hvd.own_state(tx, hvd.whole_state(tx, state, params), params), state)
    hvd.remove_process_set(process_set)


def case_flax_nnx() -> None:
    nnx = pytest.importorskip("flax.nnx")
    data = batches(5, 3, 4)

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.hidden = nnx.Linear(5, 8, rngs=rngs)
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.output = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.output(self.norm(nnx.tanh(self.hidden(x))))

    ours = train_nnx(Model(nnx.Rngs(1)), sharded_adam(), [own_rows(batch) for batch in data])
    assert_same(ours, train_nnx(Model(nnx.Rngs(1)), optax.with_extra_args_support(clipped_adam()), data))


def case_equinox() -> None:
    eqx = pytest.importorskip("equinox")
    data = batches(5, 3, 4)

    def make() -> Any:
        return eqx.nn.MLP(5, 1, 8, 2, activation=jnp.tanh, key=jax.random.key(1))

    ours = train_equinox(make(), sharded_adam(), [own_rows(batch) for batch in data], examples=len)
    assert_same(ours, train_equinox(make(), clipped_adam(), data))
