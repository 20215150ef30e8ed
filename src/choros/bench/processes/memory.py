"""A rank that trains a model of equal layers with Adam, and writes the peak of its resident memory to a file."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import choros.keras as hvd
from choros.bench.memory import BATCH, LAYERS, STEPS, width_of
from choros.bench.resident import peak_bytes


def build(layers: int, width: int) -> keras.Model:
    """Returns ``layers`` dense layers of ``width`` × ``width`` weights, with the same values on all ranks."""
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(layers)]
    return keras.Sequential([keras.Input((width,)), *dense])


def train(layers: int, width: int, shard_state: bool) -> keras.Model:
    """Trains the model for some steps, as users of ``shard_state`` do."""
    model = build(layers, width)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=shard_state), "mse")
    rows = np.random.default_rng(hvd.rank()).random((STEPS * BATCH, width), np.float32)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(rows, rows, batch_size=BATCH, callbacks=callbacks, shuffle=False, verbose=0)
    return model


def main(directory: str, parameters: str, shard_state: str) -> None:
    """Trains; writes ``RANK.json``: peaks before, after late imports by a tiny model's ``fit``, and after training."""
    hvd.init()
    hvd.pin_device()
    sliced = shard_state == "True"
    train(2, 4, sliced)
    before = peak_bytes()
    model = train(LAYERS, width_of(int(parameters)), sliced)
    figures = {"before": before, "peak": peak_bytes(), "parameters": model.count_params()}
    (Path(directory) / f"{hvd.rank()}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
