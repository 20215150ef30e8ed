"""Trains a model whose own training step takes one array, or a pair; ``--chaos`` kills a rank meanwhile.

Arguments: ``strategy`` or ``horovod``, the API; ``images`` or ``pairs``. Prints a line of JSON on each rank.
"""

import contextlib
import json
import sys

import keras
import numpy as np

import choros
import choros.distribute as dist
import choros.keras as hvd

api, given = sys.argv[1:]
hvd.init()
keras.utils.set_random_seed(0)
images = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
forms = set()


class Autoencoder(keras.Sequential):
    def train_step(self, *args):
        *state, data = args
        x, y = (data, data) if given == "images" else data
        forms.update(type(each).__name__ for each in (x, y))
        return super().train_step(*state, (x, y))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred - y))


strategy = dist.MultiWorkerMirroredStrategy() if api == "strategy" else None
with strategy.scope() if strategy else contextlib.nullcontext():
    layers = [keras.layers.Dense(3, "tanh"), keras.layers.Dense(4)]
    # Under a strategy the first step builds the model, and the slots of its optimizer.
    model = Autoencoder(layers if strategy else [keras.Input((4,)), *layers])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    model.compile(optimizer if strategy else hvd.DistributedOptimizer(optimizer))
arrays = images if given == "images" else (images, images)
if strategy:
    model.fit(*([images] if given == "images" else arrays), batch_size=20, epochs=2, verbose=0)
else:
    data, broadcasts = hvd.shard(arrays, batch_size=20), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    elastic = hvd.callbacks.ElasticCallback(data, broadcasts)
    model.fit(data, shuffle=False, epochs=2, verbose=0, callbacks=[elastic, *broadcasts])
print(json.dumps({"forms": len(forms), "size": choros.size(), "sum": float(sum(w.sum() for w in model.get_weights()))}))
