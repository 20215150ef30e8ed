"""The script of each worker of ``test_multi_worker.py``: ``python worker_script.py HOW``.

The script creates the strategy from the environment, or from a resolver, and compares ``fit``, ``evaluate`` and
``predict`` with plain Keras in the same process. With ``die``, the second worker kills itself during ``fit``.
"""

import json
import os
import signal
import sys

if os.environ["KERAS_BACKEND"] != "tensorflow":
    sys.modules["tensorflow"] = None  # Keras would look for it, which takes seconds.

import keras
import numpy as np

from choros import distribute
from choros.errors import StrategyError

how = sys.argv[1]
config = json.loads(os.environ["TF_CONFIG"])
match how:
    case "environment":
        resolver = None
    case "tf_config_resolver":
        resolver = distribute.cluster_resolver.TFConfigClusterResolver()
    case "die":
        del os.environ["TF_CONFIG"]
        resolver = distribute.cluster_resolver.SimpleClusterResolver(
            config["cluster"], task_type=config["task"]["type"], task_id=config["task"]["index"]
        )

strategy = distribute.MultiWorkerMirroredStrategy(resolver)
assert strategy.num_replicas_in_sync == 2
if how != "die":
    try:
        distribute.MirroredStrategy()
    except StrategyError as error:
        print("rejected:", error)

generator = np.random.default_rng(0)
x = generator.normal(size=(65, 6)).astype("float32")
y = generator.integers(0, 3, 65).astype("int32")


def built():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and config["task"]["index"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def results(model):
    """The last batch has one example, so that one of two replicas has no row."""
    callbacks = [Die()] if how == "die" else []
    history = model.fit(x, y, batch_size=16, epochs=4, verbose=0, shuffle=False, callbacks=callbacks).history
    evaluated = model.evaluate(x, y, batch_size=7, verbose=0)
    predicted = model.predict(x, batch_size=7, verbose=0)
    weights = [keras.ops.convert_to_numpy(variable) for variable in model.weights]
    return [*history.values(), evaluated, predicted, *weights]


with strategy.scope():
    model = built()
for ours, theirs in zip(results(model), results(built()), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
print("as one process")
