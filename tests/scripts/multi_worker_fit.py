"""Keras' fit on several workers: TensorFlow's tutorial *multi_worker_with_keras*, in its order."""

import os

import numpy as np
import tensorflow as tf

from choros import distribute

tf.keras.utils.set_random_seed(1)


def mnist_dataset(batch_size):
    generator = np.random.default_rng(0)
    x_train = generator.integers(0, 256, (72, 8, 8)) / np.float32(255)
    y_train = generator.integers(0, 10, 72)
    return tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(60000).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(input_shape=(8, 8)),
            tf.keras.layers.Reshape(target_shape=(8, 8, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


batch_size = 16
single_worker_dataset = mnist_dataset(batch_size)
single_worker_model = build_and_compile_cnn_model()
history = single_worker_model.fit(single_worker_dataset, epochs=1, steps_per_epoch=2)
print("Loss of a single worker: {}".format(history.history["loss"]))

strategy = distribute.MultiWorkerMirroredStrategy()
num_workers = strategy.num_replicas_in_sync
global_batch_size = int(os.environ["PER_REPLICA"]) * num_workers

tf.keras.utils.set_random_seed(2)
multi_worker_dataset = mnist_dataset(global_batch_size)
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=2, steps_per_epoch=3)
print("Loss: {}".format(history.history["loss"]))

options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
dataset_no_auto_shard = mnist_dataset(64).with_options(options)

model_path = "multi-worker/keras-model.keras"


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id = (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)
tf.io.gfile.makedirs(os.path.dirname(model_path))
write_model_path = write_filepath(model_path, task_type, task_id)
multi_worker_model.save(write_model_path)
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))

loaded_model = tf.keras.models.load_model(model_path)
history = loaded_model.fit(single_worker_dataset, epochs=1, steps_per_epoch=2)
print("Loss of the loaded model: {}".format(history.history["loss"]))

checkpoint_dir = "multi-worker/ckpt"
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
checkpoint_manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
checkpoint_manager.save()
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)
latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
checkpoint.restore(latest_checkpoint)
history = multi_worker_model.fit(multi_worker_dataset, epochs=1, steps_per_epoch=2)
print("Loss: {}".format(history.history["loss"]))

callbacks = [tf.keras.callbacks.BackupAndRestore(backup_dir="multi-worker/backup")]
with strategy.scope():
    multi_worker_model = build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=2, steps_per_epoch=2, callbacks=callbacks)
print("Loss: {}".format(history.history["loss"]))
