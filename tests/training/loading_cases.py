"""How long steps of ``fit`` wait for their data, as the page of the rank has it."""

from __future__ import annotations

import threading
import time
from typing import Any

import keras
import numpy as np

import choros.keras as hvd
from choros.observe.progress import RankProgress, page, read_page
from choros.training.keras_internals.fit import first_epoch_without_batches

#: Long beside a step, behind which TensorFlow loads the next batch.
PAUSE = 0.05


class Batches(keras.utils.PyDataset):
    """Eight batches, which rank 1 needs ``PAUSE`` seconds each to load; the last one has fewer rows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if hvd.rank() == 1:
            time.sleep(PAUSE)
        rows = 1 if index == 7 else 4
        return np.full((rows, 2), index, "float32"), np.ones((rows, 1), "float32")


def fitted(**compiled: Any) -> tuple[RankProgress, list[np.ndarray]]:
    """What a ``fit`` of three epochs adds to the page, and its weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)), "mse", **compiled)
    before = read_page(page.memory)
    model.fit(
        Batches(), epochs=3, shuffle=False, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    )
    after = read_page(page.memory)
    added = {name: getattr(after, name) - getattr(before, name) for name in ("steps", "loading", "seconds", "pausing")}
    return RankProgress(hvd.rank(), **added), model.get_weights()


def case_a_rank_that_loads_slowly() -> None:
    done, _ = fitted()
    loading = hvd.allgather(np.array([done.loading]))
    assert loading[1] > done.steps * PAUSE / 2  # some of it passes while the rank computes
    assert done.loading <= done.seconds + 1e-6
    assert done.pausing > 0


def case_several_steps_in_a_call() -> None:
    """Keras reads on from what may have ended, on TensorFlow; the weights are the same. It refuses them on torch."""
    if keras.backend.backend() == "torch":
        return
    weights = [fitted(steps_per_execution=number)[1] for number in (1, 3)]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def case_an_iterator_of_tensorflow() -> None:
    """It reads what another one would: of any structure, to its end, again in each epoch."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    from choros.training.tensorflow_iterators import TimedIterator, loaded

    def slow(value: Any) -> Any:
        time.sleep(PAUSE)
        return value

    rows = tf.data.Dataset.from_tensor_slices(
        {"x": tf.ragged.constant([[1], [2, 3], [4]]), "y": [(1, 2), (3, 4), (5, 6)]}
    )
    data = rows.map(lambda each: {**each, "z": tf.numpy_function(slow, [each["y"]], tf.int32)})

    @tf.function(reduce_retracing=True)
    def total(iterator: Any) -> Any:
        batch = iterator.get_next()
        return tf.reduce_sum(batch["x"]) + tf.reduce_sum(batch["y"])

    for _ in range(2):
        source, before = iter(data), float(loaded().numpy())
        timed = TimedIterator.of(source)
        assert [int(total(timed)) for _ in range(3)] == [4, 12, 15]
        assert float(loaded().numpy()) - before > 2.5 * PAUSE
        try:
            total(timed)
        except tf.errors.OutOfRangeError:
            continue
        raise AssertionError("it has not ended")
    assert total.experimental_get_tracing_count() == 1
    assert TimedIterator.of([1]) == [1]


def case_the_end_of_an_iterator_of_tensorflow() -> None:
    """Another thread waits for it, as for the thread that tunes the iterator; this one goes on."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    from choros.training.tensorflow_iterators import end_in_background

    let_end, ended = threading.Event(), threading.Event()

    class EndsSlowly:
        def __del__(self) -> None:
            let_end.wait(20)
            ended.set()

    end_in_background()
    iterator = iter(tf.data.Dataset.range(2))
    next(iterator)
    iterator._iterator_resource = EndsSlowly()
    del iterator
    assert not ended.is_set()
    let_end.set()
    assert ended.wait(20)


def case_many_calls_of_fit_in_an_elastic_job() -> None:
    """What it puts around the training function on JAX, which is timed, it takes away again."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3)), "mse")
    functions = []
    for _ in range(3):
        with first_epoch_without_batches(model):
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=callbacks)
        functions.append(model.train_function)
    assert functions[2] is functions[1]
