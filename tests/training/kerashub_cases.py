"""A task of KerasHub with LoRA, few trained and many frozen variables, on several ranks and on one.

Run by ``test_kerashub.py``. The last of three batches has one row, so that one rank gets none.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import keras_hub
import numpy as np

import choros.keras as hvd
from choros import distribute
from choros.parallel.objects import broadcast_object
from ranks.reference import of_one_rank

VOCABULARY, LENGTH, BATCH, N = 11, 6, 8, 17
JIT = False if keras.backend.backend() == "tensorflow" else "auto"


@functools.cache
def strategy() -> distribute.Strategy:
    return distribute.MirroredStrategy()


def texts(n: int = N) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (n, LENGTH + 1)).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": np.ones((n, LENGTH), "int32")}
    return x, tokens[:, 1:], np.ones((n, LENGTH), "float32")


def task(road: str = "plain") -> keras.Model:
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        dropout=0.0,
        max_sequence_length=LENGTH,
    )
    backbone.enable_lora(2)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    optimizer: Any = keras.optimizers.SGD(0.5)
    model.compile(
        optimizer=hvd.DistributedOptimizer(optimizer) if road == "horovod" else optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=JIT,
    )
    return model


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(weight.value)) for weight in model.weights]


def trained(road: str) -> tuple[list[np.ndarray], dict[str, list[float]]]:
    with strategy().scope() if road == "strategy" else keras.name_scope("own"):
        model = task(road)
    x, y, weight = texts()
    fixed = {"epochs": 2, "shuffle": False, "verbose": 0}
    if road == "horovod":
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        batches = hvd.shard((x, y, weight), batch_size=BATCH)
        history = model.fit(batches, validation_data=batches, callbacks=callbacks, **fixed)
    else:
        history = model.fit(x, y, sample_weight=weight, batch_size=BATCH, validation_data=(x, y, weight), **fixed)
    return weights(model), history.history


def case_lora():
    start = of_one_rank(lambda: weights(task()))
    expected, history = of_one_rank(lambda: trained("plain"))
    changed = [not np.array_equal(before, after) for before, after in zip(start, expected, strict=True)]
    assert 0 < sum(changed) < len(changed) / 2, "few are trained"
    for road in ("strategy", "horovod"):
        ours, own = trained(road)
        for mine, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, err_msg=road)
            np.testing.assert_array_equal(mine, broadcast_object(mine), err_msg=road)
        for name, values in history.items():
            np.testing.assert_allclose(own[name], values, rtol=1e-4, err_msg=f"{road} {name}")


def case_shuffled_rows():
    """All ranks draw the same order: together they read each row once in an epoch, in another order in the next."""
    (x, _, _), seen = texts(), []
    x["token_ids"][:, 0] = np.arange(N)
    batches = hvd.shard(x, batch_size=BATCH, shuffle=True)
    for _ in range(2):
        own = [row for batch in batches for row in np.asarray(batch["token_ids"])[:, 0].tolist()]
        seen.append([row for rows in hvd.allgather_object(own) for row in rows])
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(N))
    assert seen[0] != seen[1]
