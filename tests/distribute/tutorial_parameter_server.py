"""TensorFlow's tutorial "Parameter server training", cell by cell, with `distribute` for `tf.distribute`.

What Keras 3 does not have, or refuses, is replaced; the comments that begin with "Keras 3" say so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import tempfile

import tensorflow as tf

from choros import distribute
from harness import free_port

RESULTS = {}

# In-process cluster.


def create_in_process_cluster(num_workers, num_ps):
    cluster_dict = {"worker": [f"localhost:{free_port()}" for _ in range(num_workers)]}
    if num_ps > 0:
        cluster_dict["ps"] = [f"localhost:{free_port()}" for _ in range(num_ps)]
    cluster_spec = tf.train.ClusterSpec(cluster_dict)
    worker_config = tf.compat.v1.ConfigProto()
    if multiprocessing.cpu_count() < num_workers + 1:
        worker_config.inter_op_parallelism_threads = num_workers + 1
    for i in range(num_workers):
        distribute.Server(cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc")
    for i in range(num_ps):
        distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
    return distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


NUM_WORKERS = 3
NUM_PS = 2
cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)

# The strategy, with variables of 256 KiB or more in shards.

variable_partitioner = distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=(256 << 10), max_shards=NUM_PS
)
strategy = distribute.experimental.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)

# Model.fit.


def fit_dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(64)
    x = tf.random.uniform((10, 10))
    y = tf.random.uniform((10, 1))  # Keras 3: (10,) does not fit the outputs (64, 10)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


# Keras 3 has no DatasetCreator.
dc = strategy.distribute_datasets_from_function(fit_dataset_fn)

with strategy.scope():
    # Keras 3: BackupAndRestore needs a model that is built.
    model = tf.keras.models.Sequential([tf.keras.Input((10,)), tf.keras.layers.Dense(10)])
    model.compile(tf.keras.optimizers.SGD(), loss="mse", steps_per_execution=10)

working_dir = tempfile.mkdtemp()
callbacks = [
    tf.keras.callbacks.TensorBoard(log_dir=os.path.join(working_dir, "log")),
    # Keras 3: the name of a model ends in .keras.
    tf.keras.callbacks.ModelCheckpoint(filepath=os.path.join(working_dir, "ckpt.keras")),
    tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.join(working_dir, "backup")),
]
history = model.fit(dc, epochs=5, steps_per_epoch=20, callbacks=callbacks, verbose=0, shuffle=False)
RESULTS["fit"] = history.history["loss"]
RESULTS["files"] = sorted(os.listdir(working_dir))

# A custom training loop: the data.

feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
label_vocab = ["yes", "no"]

with strategy.scope():
    feature_lookup_layer = tf.keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
    label_lookup_layer = tf.keras.layers.StringLookup(vocabulary=label_vocab, num_oov_indices=0, mask_token=None)

    # Keras 3: inputs have the names of their keys.
    raw_feature_input = tf.keras.layers.Input(shape=(3,), dtype=tf.string, name="features")
    feature_id_input = feature_lookup_layer(raw_feature_input)
    feature_preprocess_stage = tf.keras.Model({"features": raw_feature_input}, feature_id_input)

    raw_label_input = tf.keras.layers.Input(shape=(1,), dtype=tf.string, name="label")
    label_id_input = label_lookup_layer(raw_label_input)
    label_preprocess_stage = tf.keras.Model({"label": raw_label_input}, label_id_input)


def feature_and_label_gen(num_examples=200):
    examples = {"features": [], "label": []}
    for _ in range(num_examples):
        features = random.sample(feature_vocab, 3)
        label = ["yes"] if "avenger" in features else ["no"]
        examples["features"].append(features)
        examples["label"].append(label)
    return examples


examples = feature_and_label_gen()


def preprocess(x):  # Keras 3: models take batches, in dictionaries
    features = feature_preprocess_stage({"features": x["features"]})
    return {"features": features}, label_preprocess_stage({"label": x["label"]})


def dataset_fn(_):
    raw_dataset = tf.data.Dataset.from_tensor_slices(examples)
    return raw_dataset.shuffle(200).batch(32).map(preprocess).repeat()


# The model.

with strategy.scope():
    model_input = tf.keras.layers.Input(shape=(3,), dtype=tf.int64, name="features")
    emb_layer = tf.keras.layers.Embedding(input_dim=len(feature_lookup_layer.get_vocabulary()), output_dim=16384)
    # Keras 3: TensorFlow's operations take no Keras tensors.
    emb_output = tf.keras.ops.mean(emb_layer(model_input), axis=1)
    dense_output = tf.keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
    model = tf.keras.Model({"features": model_input}, dense_output)

    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.1)
    accuracy = tf.keras.metrics.Accuracy()

# Keras 3: a layer has one variable for each weight; the strategy knows its shards.
shards = strategy.shards(emb_layer.embeddings)
assert len(shards) == 2
assert shards[0].shape == (4, 16384)
assert shards[1].shape == (4, 16384)
# In choros, any server may have the first one.
devices = sorted(shard.device for shard in shards)
assert devices == ["/job:ps/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0"]

# The training step.


@tf.function
def step_fn(iterator):
    def replica_fn(batch_data, labels):
        with tf.GradientTape() as tape:
            pred = model(batch_data, training=True)
            # Keras 3 has no Reduction.NONE.
            per_example_loss = tf.keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
            loss = tf.nn.compute_average_loss(per_example_loss)
            gradients = tape.gradient(loss, model.trainable_variables)

        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
        accuracy.update_state(labels, actual_pred)
        return loss

    batch_data, labels = next(iterator)
    losses = strategy.run(replica_fn, args=(batch_data, labels))
    return strategy.reduce(distribute.ReduceOp.SUM, losses, axis=None)


# Steps on workers.

coordinator = distribute.experimental.coordinator.ClusterCoordinator(strategy)


@tf.function
def per_worker_dataset_fn():
    return strategy.distribute_datasets_from_function(dataset_fn)


per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
per_worker_iterator = iter(per_worker_dataset)

RESULTS["accuracy"] = []
num_epoches = 12  # of asynchronous steps, and in the tutorial 4
steps_per_epoch = 5
for _ in range(num_epoches):
    accuracy.reset_state()  # Keras 3 has no reset_states
    for _ in range(steps_per_epoch):
        coordinator.schedule(step_fn, args=(per_worker_iterator,))
    coordinator.join()
    RESULTS["accuracy"].append(float(accuracy.result().numpy()))

loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
RESULTS["loss"] = float(loss.fetch())

# Inline evaluation, on the coordinator and on the workers.

eval_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16)).batch(8).map(preprocess)
eval_accuracy = tf.keras.metrics.Accuracy()
for batch_data, labels in eval_dataset:
    pred = model(batch_data, training=False)
    actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
    eval_accuracy.update_state(labels, actual_pred)
RESULTS["evaluation"] = float(eval_accuracy.result())

with strategy.scope():
    eval_accuracy = tf.keras.metrics.Accuracy()


@tf.function
def eval_step(iterator):
    def replica_fn(batch_data, labels):
        pred = model(batch_data, training=False)
        actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
        eval_accuracy.update_state(labels, actual_pred)

    batch_data, labels = next(iterator)
    strategy.run(replica_fn, args=(batch_data, labels))


def eval_dataset_fn():
    raw_dataset = tf.data.Dataset.from_tensor_slices(feature_and_label_gen(num_examples=16))
    return raw_dataset.shuffle(16).repeat().batch(8).map(preprocess)


per_worker_eval_dataset = coordinator.create_per_worker_dataset(eval_dataset_fn)
per_worker_eval_iterator = iter(per_worker_eval_dataset)

eval_steps_per_epoch = 2
for _ in range(eval_steps_per_epoch):
    coordinator.schedule(eval_step, args=(per_worker_eval_iterator,))
coordinator.join()
RESULTS["distributed evaluation"] = float(eval_accuracy.result())
RESULTS["evaluated"] = int(eval_accuracy.count.numpy())

# "If you launch all steps": a loop that polls.

for _ in range(steps_per_epoch):
    coordinator.schedule(step_fn, args=(per_worker_iterator,))
while not coordinator.done():
    pass

# Checkpoints, as after the failure of a parameter server.

checkpoint_manager = tf.train.CheckpointManager(
    tf.train.Checkpoint(model=model, optimizer=optimizer), os.path.join(working_dir, "checkpoints"), max_to_keep=3
)
checkpoint_manager.save()
RESULTS["global steps"] = int(optimizer.iterations.numpy())
if checkpoint_manager.latest_checkpoint:
    checkpoint_manager.checkpoint.restore(checkpoint_manager.latest_checkpoint).assert_existing_objects_matched()
coordinator.schedule(step_fn, args=(per_worker_iterator,))
coordinator.join()
RESULTS["restored global steps"] = int(optimizer.iterations.numpy())

if __name__ == "__main__":
    print(json.dumps(RESULTS))
