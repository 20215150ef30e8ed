"""What ``choros memory`` counts is what objects have, on every rank; run by ``test_memory.py``."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import choros.keras as hvd
from choros.memory.model import BY_ITEMS, BY_VARIABLES, UNDIVIDED, rank_bytes
from choros.memory.objects import trained_model
from choros.training.host_gradients import nbytes

OPTIMIZERS = {
    "SGD": (keras.optimizers.SGD, {}),
    "Adam": (keras.optimizers.Adam, {"amsgrad": True}),
    "AdamW": (keras.optimizers.AdamW, {"use_ema": True, "gradient_accumulation_steps": 2}),
    "Adafactor": (keras.optimizers.Adafactor, {}),
    "Lamb": (keras.optimizers.Lamb, {}),
}


def model_of(optimizer: Any) -> Any:
    layers = [keras.layers.Dense(32), keras.layers.BatchNormalization(), keras.layers.Dense(24), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    model.compile(optimizer, "mse")
    return model


def trained(model: Any) -> Any:
    rows = np.ones((8, 64), np.float32)
    model.fit(rows, rows[:, :1], batch_size=4, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return model


def state_bytes(optimizer: Any) -> int:
    return sum(map(nbytes, optimizer.variables))


def case_whole_state() -> None:
    for name, (create, given) in OPTIMIZERS.items():
        model = trained(model_of(hvd.DistributedOptimizer(create(**given))))
        found = rank_bytes(trained_model(model, model.optimizer), 1, shard_state=False)
        assert found["state"] == state_bytes(model.optimizer), name
        assert found["weights"] == found["gradients"] == sum(map(nbytes, model.trainable_variables)), name
        assert found["buffers"] == sum(map(nbytes, model.non_trainable_variables)), name


def case_slices_of_the_state() -> None:
    for name, (create, given) in OPTIMIZERS.items():
        optimizer = hvd.DistributedOptimizer(create(**given), shard_state=True)
        model = trained(model_of(optimizer))
        counted = trained_model(model, optimizer)
        assert counted.division == (BY_ITEMS if name in ("SGD", "Adam", "AdamW") else BY_VARIABLES)
        assert counted == trained_model(model_of(create(**given)), create(**given)), name
        most = max(hvd.allgather_object(state_bytes(optimizer)))
        # Cuts are at multiples of 16 items; the slice variable that stands for no variable has an item, too.
        slack = 600 if name != "SGD" else 64
        assert abs(rank_bytes(counted, hvd.size(), shard_state=True)["state"] - most) <= slack, name


def case_a_loss_scale_and_half_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = model_of(keras.optimizers.Adam())
        model.optimizer.build(model.trainable_variables)
        found = trained_model(model, model.optimizer)
        assert found.optimizer == "Adam"
        assert rank_bytes(found, 1, shard_state=False)["state"] == state_bytes(model.optimizer)
    finally:
        keras.config.set_dtype_policy("float32")


def case_what_is_not_divided() -> None:
    class Global(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply(grads, trainable_variables)

    assert trained_model(model_of(None), Global(momentum=0.9)).division == UNDIVIDED
    alone = trained_model(model_of(None), None)
    assert (alone.optimizer, alone.division, alone.shared_state) == ("no optimizer", UNDIVIDED, 0)


def case_an_optimizer_that_cannot_be_made_again() -> None:
    class Bound(keras.optimizers.SGD):
        def __init__(self, factor: float) -> None:
            super().__init__(factor)

    with pytest.raises(ValueError, match=r"the state of Bound is not known: .* Let get_config\(\) return all"):
        trained_model(model_of(None), Bound(0.1))
