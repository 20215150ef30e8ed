"""A plain JAX loop with optax: with ``choros``' transformation, or on a ``mesh`` of all processes."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import keras
import optax

from choros.bench.cases import TrainCase, batches
from choros.bench.channel import Prepare, Task, serve_one_of
from choros.bench.processes.keras_fit import build


def choros() -> Prepare:
    """Trains with the distributed transformation of ``choros.jax``."""
    import choros.jax as hvd

    hvd.init()

    def prepare(case: Any) -> Task:
        return loop_task(case, hvd.distributed, hvd.broadcast_parameters, jax.device_put)

    return prepare


def mesh() -> Prepare:
    """Trains by ``jax.jit`` on a mesh of the processes that ``jax.distributed`` connects: XLA reduces, on Gloo."""
    jax.distributed.initialize(
        os.environ["KERAS_DISTRIBUTION_JOB_ADDRESSES"],
        int(os.environ["KERAS_DISTRIBUTION_NUM_PROCESSES"]),
        int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"]),
    )
    devices = jax.sharding.Mesh(jax.devices(), "data")
    replicated, sharded = (
        jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("data",))
    )

    def place(tree: Any) -> Any:
        return jax.tree.map(partial(jax.make_array_from_process_local_data, replicated), tree)

    return lambda case: loop_task(case, lambda tx: tx, place, partial(jax.make_array_from_process_local_data, sharded))


def loop_task(
    case: TrainCase, wrap: Callable[[Any], Any], place: Callable[[Any], Any], batch_of: Callable[[Any], Any]
) -> Task:
    """Returns the training loop as a task whose unit is a step; ``batch_of`` returns the global batch's array."""
    keras.utils.clear_session()
    model, _ = build(case.model)
    tx = wrap(optax.sgd(0.01) if case.model == "mlp" else optax.adam(0.001))
    steps = 16
    placed = [tuple(map(batch_of, batch)) for batch in zip(*batches(case, steps, case.batch), strict=True)]

    def loss_of(trained: Any, others: Any, images: Any, labels: Any) -> Any:
        predicted, others = model.stateless_call(trained, others, images, training=True)
        return keras.losses.sparse_categorical_crossentropy(labels, predicted).mean(), others

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, images: Any, labels: Any) -> Any:
        trained, others, moments = state
        (loss, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained, others, images, labels)
        updates, moments = tx.update(gradients, moments, trained)
        return (optax.apply_updates(trained, updates), others, moments), loss

    trained, others = (
        [variable.value for variable in each] for each in (model.trainable_variables, model.non_trainable_variables)
    )
    state = place((trained, others, tx.init(trained)))

    def run(units: int) -> None:
        nonlocal state
        for unit in range(units):
            state, loss = step(state, *placed[unit % steps])
        jax.block_until_ready(loss)

    return Task(run)


if __name__ == "__main__":
    serve_one_of(choros, mesh)
