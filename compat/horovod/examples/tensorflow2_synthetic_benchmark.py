"""Images a second of a model of Keras with Horovod's TensorFlow API, on random images.

::

    horovodrun -np 2 python tensorflow2_synthetic_benchmark.py
    horovodrun -np 2 python tensorflow2_synthetic_benchmark.py --model ResNet50 --image-size 224 --batch-size 32

``--model`` is ``small``, or the name of a model of ``tf.keras.applications``.
"""

import argparse
import timeit

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="small", help="small, or a model of tf.keras.applications")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of images")
    parser.add_argument("--batch-size", type=int, default=8, help="images of a step of each process")
    parser.add_argument("--num-warmup-batches", type=int, default=2, help="steps that are not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="steps of a measurement")
    parser.add_argument("--num-iters", type=int, default=5, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in float16")
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    return parser.parse_args()


def build_model(name, image_size):
    shape = (image_size, image_size, 3)
    if name != "small":
        return getattr(tf.keras.applications, name)(weights=None, input_shape=shape)
    layers = [tf.keras.layers.Input(shape)]
    for filters in (16, 32, 64):
        layers += [
            tf.keras.layers.Conv2D(filters, 3, strides=2, use_bias=False),
            tf.keras.layers.BatchNormalization(),
            tf.keras.layers.ReLU(),
        ]
    layers += [tf.keras.layers.GlobalAveragePooling2D(), tf.keras.layers.Dense(1000, activation="softmax")]
    return tf.keras.Sequential(layers)


def main():
    args = parse_arguments()
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if args.no_cuda:
        tf.config.set_visible_devices([], "GPU")
    elif gpus:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    name = "GPU" if gpus and not args.no_cuda else "CPU"

    model = build_model(args.model, args.image_size)
    optimizer = tf.keras.optimizers.SGD(0.01)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    images = tf.random.uniform([args.batch_size, args.image_size, args.image_size, 3])
    labels = tf.random.uniform([args.batch_size], maxval=1000, dtype=tf.int64)

    @tf.function
    def step(is_first):
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        if is_first:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    log(f"Model {args.model}, {args.batch_size} images for each of {hvd.size()} {name}(s)")
    step(True)
    measure(step, args.num_warmup_batches)
    speeds = []
    for index in range(args.num_iters):
        seconds = measure(step, args.num_batches_per_iter)
        speeds.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iteration {index}: {speeds[-1]:.1f} images/s on each {name}")
    mean, spread = np.mean(speeds), 1.96 * np.std(speeds)
    log(f"On each {name}: {mean:.1f} +- {spread:.1f} images/s")
    log(f"On {hvd.size()} {name}(s): {hvd.size() * mean:.1f} +- {hvd.size() * spread:.1f} images/s")


def measure(step, number):
    return timeit.timeit(lambda: step(False).numpy(), number=number)  # numpy() waits for the GPU


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
