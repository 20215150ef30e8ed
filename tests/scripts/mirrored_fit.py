"""Keras' fit in a strategy: TensorFlow's tutorials *keras* and *save_and_load*, in their order."""

import os
import time

import numpy as np
import tensorflow as tf

from choros import distribute

tf.keras.utils.set_random_seed(1)

generator = np.random.default_rng(0)
images, labels = generator.integers(0, 256, (75, 8, 8, 1), np.uint8), generator.integers(0, 10, 75)
mnist_train = tf.data.Dataset.from_tensor_slices((images[:64], labels[:64]))
mnist_test = tf.data.Dataset.from_tensor_slices((images[64:], labels[64:]))

strategy = distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))

num_train_examples = len(mnist_train)
BUFFER_SIZE = 10000
BATCH_SIZE_PER_REPLICA = int(os.environ["PER_REPLICA"])
BATCH_SIZE = BATCH_SIZE_PER_REPLICA * strategy.num_replicas_in_sync


def scale(image, label):
    image = tf.cast(image, tf.float32)
    image /= 255
    return image, label


train_dataset = mnist_train.map(scale).cache().shuffle(BUFFER_SIZE).batch(BATCH_SIZE)
eval_dataset = mnist_test.map(scale).batch(BATCH_SIZE)


def build_model():
    return tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(4, 3, activation="relu", input_shape=(8, 8, 1)),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def compile_model(model):
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(),
        metrics=["accuracy"],
    )


with strategy.scope():
    model = build_model()
    compile_model(model)

checkpoint_dir = "./fit_checkpoints"
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt_{epoch}.weights.h5")


def decay(epoch):
    if epoch < 1:
        return 1e-2
    return 1e-3


class PrintLR(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = model.optimizer.learning_rate.numpy()
        print("\nEpoch {}, learning rate {}, loss {}".format(epoch + 1, rate, logs["loss"]))


class Throughput(tf.keras.callbacks.Callback):
    def __init__(self, total_images=0):
        self.total_images = total_images

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_start_time = time.time()

    def on_epoch_end(self, epoch, logs=None):
        epoch_time = time.time() - self.epoch_start_time
        print("Images/sec: {}".format(round(self.total_images / epoch_time, 2)))


callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir="./logs"),
    tf.keras.callbacks.ModelCheckpoint(filepath=checkpoint_prefix, save_weights_only=True),
    tf.keras.callbacks.LearningRateScheduler(decay),
    PrintLR(),
]
model.fit(train_dataset, epochs=2, callbacks=callbacks)

model.load_weights(os.path.join(checkpoint_dir, sorted(os.listdir(checkpoint_dir))[-1]))
eval_loss, eval_acc = model.evaluate(eval_dataset)
print("Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))

path = "my_model.keras"
model.save(path)

unreplicated_model = tf.keras.models.load_model(path)
compile_model(unreplicated_model)
eval_loss, eval_acc = unreplicated_model.evaluate(eval_dataset)
print("Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))

with strategy.scope():
    replicated_model = tf.keras.models.load_model(path)
    compile_model(replicated_model)
    eval_loss, eval_acc = replicated_model.evaluate(eval_dataset)
    print("Eval loss: {}, Eval Accuracy: {}".format(eval_loss, eval_acc))

# ── save and load ────────────────────────────────────────────────────────────────────────────────

keras_model_path = "keras_save.keras"
tf.keras.models.save_model(model, keras_model_path)
restored_keras_model = tf.keras.models.load_model(keras_model_path)
history = restored_keras_model.fit(train_dataset, epochs=2)
print("Loss without a strategy: {}".format(history.history["loss"]))

another_strategy = distribute.OneDeviceStrategy("/cpu:0")
with another_strategy.scope():
    restored_keras_model_ds = tf.keras.models.load_model(keras_model_path)
    history = restored_keras_model_ds.fit(train_dataset, epochs=2)
print("Loss on one device: {}".format(history.history["loss"]))

with strategy.scope():
    model = build_model()
    compile_model(model)
saved_model_path = "tf_save"
tf.saved_model.save(model, saved_model_path)

DEFAULT_FUNCTION_KEY = "serving_default"
loaded = tf.saved_model.load(saved_model_path)
inference_func = loaded.signatures[DEFAULT_FUNCTION_KEY]
predict_dataset = eval_dataset.map(lambda image, label: image)
for batch in predict_dataset.take(1):
    print("Loss of the saved model:", float(tf.reduce_sum(next(iter(inference_func(batch).values())))))

another_strategy = distribute.MirroredStrategy()
with another_strategy.scope():
    loaded = tf.saved_model.load(saved_model_path)
    inference_func = loaded.signatures[DEFAULT_FUNCTION_KEY]
    dist_predict_dataset = another_strategy.experimental_distribute_dataset(predict_dataset)
    for batch in dist_predict_dataset:
        outputs = another_strategy.run(inference_func, args=(batch,))

model.export("exported", verbose=False)

# ── a course's model, with a loss scale and a callback that is not in a list ─────────────────────

with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(4, [3, 3], activation="relu", input_shape=(8, 8, 1)),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(),
        optimizer=tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.Adam()),
        metrics=["accuracy"],
    )
history = model.fit(train_dataset, epochs=2, callbacks=Throughput(total_images=len(mnist_train)))
print("Loss with a loss scale: {}".format(history.history["loss"]))


class SubclassedModel(tf.keras.Model):
    output_name = "output_layer"

    def __init__(self):
        super().__init__()
        self._dense_layer = tf.keras.layers.Dense(5, dtype=tf.float32, name=self.output_name)

    def call(self, inputs):
        return self._dense_layer(inputs)


with strategy.scope():
    my_model = SubclassedModel()
my_model(tf.ones((2, 3)))
options = tf.saved_model.SaveOptions(experimental_io_device="/job:localhost")
tf.saved_model.save(my_model, "subclassed", options=options)
assert os.path.exists("subclassed/saved_model.pb")
