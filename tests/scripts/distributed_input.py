"""Distributed data sets: TensorFlow's tutorial *input*, in its order."""

import numpy as np
import tensorflow as tf

from choros import distribute

N_VIRTUAL_DEVICES = 2
physical_devices = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    physical_devices[0], [tf.config.LogicalDeviceConfiguration() for _ in range(N_VIRTUAL_DEVICES)]
)

print("Available devices:")
for i, device in enumerate(tf.config.list_logical_devices()):
    print("%d) %s" % (i, device))

global_batch_size = 16
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)


@tf.function
def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


for inputs in dataset:
    assert train_step(inputs).shape[0] in (16, 4)

mirrored_strategy = distribute.MirroredStrategy()
replicas = mirrored_strategy.num_replicas_in_sync
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
assert next(iter(dist_dataset))[0].shape == (global_batch_size // replicas, 1)

dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)
assert next(iter(mirrored_strategy.experimental_distribute_dataset(dataset)))[0].shape == (16 // replicas, 1)

mirrored_strategy = distribute.MirroredStrategy()


def dataset_fn(input_context):
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(64).batch(16)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    dataset = dataset.batch(batch_size)
    return dataset.prefetch(2)


dist_dataset = mirrored_strategy.distribute_datasets_from_function(dataset_fn)
assert sum(features.shape[0] for features, _ in dist_dataset) == 4 // replicas

global_batch_size = 16
mirrored_strategy = distribute.MirroredStrategy()
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


@tf.function  # another function of the name, as in the tutorial
def train_step(inputs):
    features, labels = inputs
    return labels - 0.3 * features


rows = 0
for x in dist_dataset:
    loss = mirrored_strategy.run(train_step, args=(x,))
    rows += loss.shape[0]
assert rows == 100 // replicas
print("Loss is", float(mirrored_strategy.reduce("MEAN", loss, axis=0)[0]))

num_epochs = 2
steps_per_epoch = 5
for epoch in range(num_epochs):
    dist_iterator = iter(dist_dataset)
    for step in range(steps_per_epoch):
        loss = mirrored_strategy.run(train_step, args=(next(dist_iterator),))
        same = mirrored_strategy.run(train_step, args=(dist_iterator.get_next(),)) if step == 0 else loss
    print("Loss is", float(loss[0, 0]), float(same[0, 0]))

global_batch_size = 4
steps_per_loop = 5
strategy = distribute.MirroredStrategy()
dataset = tf.data.Dataset.range(9).batch(global_batch_size)
distributed_iterator = iter(strategy.experimental_distribute_dataset(dataset))


@tf.function
def train_fn(distributed_iterator):
    for _ in tf.range(steps_per_loop):
        optional_data = distributed_iterator.get_next_as_optional()
        if not optional_data.has_value():
            break
        per_replica_results = strategy.run(lambda x: x, args=(optional_data.get_value(),))
        tf.print(strategy.experimental_local_results(per_replica_results))


train_fn(distributed_iterator)

global_batch_size = 16
epochs = 2
steps_per_epoch = 5
mirrored_strategy = distribute.MirroredStrategy()
dataset = tf.data.Dataset.from_tensors(([1.0], [1.0])).repeat(100).batch(global_batch_size)
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)


@tf.function(input_signature=[dist_dataset.element_spec])
def train_step(per_replica_inputs):
    def step_fn(inputs):
        return 2 * inputs

    return mirrored_strategy.run(step_fn, args=(per_replica_inputs,))


for _ in range(epochs):
    iterator = iter(dist_dataset)
    for _ in range(steps_per_epoch):
        output = train_step(next(iterator))
assert len(output) == 4

strategy = distribute.MirroredStrategy()
vocab = ["a", "b", "c", "d", "f"]
with strategy.scope():
    layer = tf.keras.layers.StringLookup(vocabulary=vocab)


def dataset_fn(input_context):
    dataset = tf.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
    global_batch_size = 4
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    dataset = dataset.batch(batch_size)
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    def preprocess_with_kpl(input):
        return layer(input)

    return dataset.map(preprocess_with_kpl)


distributed_dataset = strategy.distribute_datasets_from_function(dataset_fn)
distributed_dataset_iterator = iter(distributed_dataset)
for _ in range(3):
    assert next(distributed_dataset_iterator).shape == (4 // replicas,)

mirrored_strategy = distribute.MirroredStrategy()


def value_fn(ctx):
    return tf.constant(ctx.replica_id_in_sync_group)


distributed_values = mirrored_strategy.experimental_distribute_values_from_function(value_fn)


@tf.function
def replica_fn(input):
    return input + 1


for _ in range(2):
    result = mirrored_strategy.run(replica_fn, args=(distributed_values,))
assert int(mirrored_strategy.reduce("SUM", result)) == replicas * (replicas + 1) // 2

mirrored_strategy = distribute.MirroredStrategy()


def input_gen():
    while True:
        yield np.random.rand(4)


dataset = tf.data.Dataset.from_generator(input_gen, output_types=(tf.float32), output_shapes=tf.TensorShape([4]))
dist_dataset = mirrored_strategy.experimental_distribute_dataset(dataset)
iterator = iter(dist_dataset)
for _ in range(4):
    result = mirrored_strategy.run(replica_fn, args=(next(iterator),))
assert result.shape == (4 // replicas,)
