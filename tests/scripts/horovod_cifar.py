"""Horovod's API: a CIFAR-style pipeline of TFRecords with random crops, and warm-up of the learning rate."""

import os

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras.callbacks import ModelCheckpoint
from tensorflow.keras.layers import Conv2D, Dense, Flatten, Input
from tensorflow.keras.models import Model
from tensorflow.keras.optimizers import SGD

import choros.keras as hvd

HEIGHT = WIDTH = 8
DEPTH = 3
NUM_CLASSES = 10
NUM_TRAIN_IMAGES = 64


def write(path, images, seed):
    generator = np.random.default_rng(seed)
    with tf.io.TFRecordWriter(path) as writer:
        for _ in range(images):
            pixels = generator.integers(0, 256, DEPTH * HEIGHT * WIDTH, np.uint8).tobytes()
            features = {
                "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[pixels])),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[generator.integers(NUM_CLASSES)])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def train_preprocess_fn(image):
    image = tf.image.resize_with_crop_or_pad(image, HEIGHT + 2, WIDTH + 2)
    image = tf.image.random_crop(image, [HEIGHT, WIDTH, DEPTH])
    return tf.image.random_flip_left_right(image)


def single_example_parser(serialized_example):
    features = tf.io.parse_single_example(
        serialized_example,
        features={"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)},
    )
    image = tf.io.decode_raw(features["image"], tf.uint8)
    image.set_shape([DEPTH * HEIGHT * WIDTH])
    image = tf.cast(tf.transpose(tf.reshape(image, [DEPTH, HEIGHT, WIDTH]), [1, 2, 0]), tf.float32)
    label = tf.cast(features["label"], tf.int32)
    return train_preprocess_fn(image), tf.one_hot(label, NUM_CLASSES)


def make_batch(filenames, batch_size):
    dataset = tf.data.TFRecordDataset(filenames).repeat()
    dataset = dataset.map(single_example_parser, num_parallel_calls=1)
    return dataset.batch(batch_size, drop_remainder=True)


hvd.init()
size = hvd.size()
data = f"data-{hvd.rank()}"
os.makedirs(data, exist_ok=True)
write(f"{data}/train.tfrecords", NUM_TRAIN_IMAGES, 0)
write(f"{data}/validation.tfrecords", 16, 1)

epochs = 2
lr = float(os.environ["RATE"])
batch_size = int(os.environ["PER_REPLICA"])
momentum = 0.9
train_dataset = make_batch(f"{data}/train.tfrecords", batch_size)
val_dataset = make_batch(f"{data}/validation.tfrecords", batch_size)

hvd.pin_device()

inputs = Input((HEIGHT, WIDTH, DEPTH))
hidden = Flatten()(Conv2D(4, 3, activation="relu")(inputs))
model = Model(inputs, Dense(NUM_CLASSES, activation="softmax")(hidden))
opt = SGD(learning_rate=lr * size, momentum=momentum)
opt = hvd.DistributedOptimizer(opt)
model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

callbacks = []
callbacks.append(hvd.callbacks.BroadcastGlobalVariablesCallback(0))
callbacks.append(hvd.callbacks.MetricAverageCallback())
callbacks.append(hvd.callbacks.LearningRateWarmupCallback(warmup_epochs=2, verbose=1))
callbacks.append(keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1))
if hvd.rank() == 0:
    callbacks.append(ModelCheckpoint("checkpoint-{epoch}.h5"))

history = model.fit(
    train_dataset,
    steps_per_epoch=(NUM_TRAIN_IMAGES // batch_size) // size,
    validation_data=val_dataset,
    validation_steps=max(1, (16 // batch_size) // size),
    epochs=epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
print("Of all ranks: {}".format([history.history[name] for name in sorted(history.history)]))
score = model.evaluate(val_dataset, steps=1, verbose=0)
assert np.isfinite(score).all()
