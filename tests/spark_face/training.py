"""What ranks run in these tests."""

from __future__ import annotations

import os

#: The framework of ranks of Keras.
TORCH = {"KERAS_BACKEND": "torch"}


def describe(*args, **kwargs):
    """Says on both streams who this is; returns its arguments, its rank, all ranks, and a variable."""
    import sys

    import choros
    from choros.parallel.objects import allgather_object

    choros.init()
    print("rank", choros.rank(), "of", choros.size())
    print("warned", choros.rank(), file=sys.stderr)
    return args, kwargs, choros.rank(), allgather_object(choros.rank()), os.environ.get("CHOROS_TEST_VALUE")


def fail_on(rank):
    """Raises on one rank while the others wait."""
    import time

    import choros

    choros.init()
    if choros.rank() == rank:
        raise KeyError("on purpose")
    time.sleep(60)


def arrays(rows=640, columns=6):
    """The same data everywhere."""
    import numpy as np

    x = np.random.default_rng(0).normal(size=(rows, columns)).astype("float32")
    return x, (x[:, :3].argmax(axis=1)).astype("int64")


def built(keras, inputs=6, classes=3):
    """A small model with the same weights everywhere."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.layers.Input((inputs,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(classes)]
    )
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(progress=None, pause=0.0, epochs=2, batch_size=32):
    """Trains under a strategy; writes each step's number into the file ``progress``. Returns the weights and how many
    steps this process has made.
    """
    import time

    import keras

    import choros.distribute as dist

    steps = []

    class Notes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)
            time.sleep(pause)
            if progress is not None:
                with open(progress, "a") as file:
                    print(len(steps), file=file)

    with dist.MultiWorkerMirroredStrategy().scope():
        model = built(keras)
    x, y = arrays()
    model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[Notes()])
    return [weight.tolist() for weight in model.get_weights()], len(steps)


def weights_of_rows(rows):
    """Trains with Horovod's API on a DataFrame's rows; returns the weights."""
    import keras

    import choros.keras as hvd

    hvd.init()
    model = built(keras, 64, 10)
    model.optimizer = hvd.DistributedOptimizer(model.optimizer)
    data = hvd.shard(rows.arrays("features", "label"), batch_size=64)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()
