"""Horovod's API of TensorFlow 2: the throughput of a model of Keras' applications on random images."""

import timeit

import numpy as np
import tensorflow as tf

import choros.tensorflow as hvd

hvd.init()

compression = hvd.Compression.fp16
model = tf.keras.applications.MobileNet(input_shape=(32, 32, 3), alpha=0.25, weights=None, classes=10)
opt = tf.optimizers.SGD(0.01)

data = tf.random.uniform([4, 32, 32, 3])
target = tf.random.uniform([4, 1], minval=0, maxval=9, dtype=tf.int64)


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.reduce_mean(tf.losses.sparse_categorical_crossentropy(target, probs))

    tape = hvd.DistributedGradientTape(tape, compression=compression)

    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))

    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)


def log(s, nl=True):
    if hvd.rank() != 0:
        return
    print(s, end="\n" if nl else "")


log("Batch size: 4")
log("Number of devices: %d" % hvd.size())
benchmark_step(first_batch=True)

img_secs = []
for x in range(2):
    time = timeit.timeit(lambda: benchmark_step(first_batch=False), number=2)
    img_sec = 4 * 2 / time
    log("Iter #%d: %.1f img/sec per device" % (x, img_sec))
    img_secs.append(img_sec)

log("Total img/sec on %d devices: %.1f" % (hvd.size(), hvd.size() * np.mean(img_secs)))
print("Of all ranks: {}".format(float(sum(tf.reduce_sum(abs(each.value)) for each in model.trainable_variables))))
