"""One replica: ``OneDeviceStrategy``, and the default strategy; run by ``test_devices.py`` on each framework."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from choros import distribute
from choros.errors import ConfigError, StrategyError

BACKEND = keras.backend.backend()


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    built = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    built.compile("adam", "mse")
    return built


def device_of(tensor) -> str:
    return str(tensor.device).lower()


def case_fit_equals_that_of_keras():
    on = distribute.OneDeviceStrategy("/cpu:0")
    with on.scope():
        ours = model()
    theirs = model()
    x, y = np.ones((7, 3), "float32"), np.ones((7, 2), "float32")
    histories = [each.fit(x, y, batch_size=4, epochs=2, verbose=0).history for each in (ours, theirs)]
    assert histories[0] == histories[1]
    assert "cpu" in device_of(ours.weights[0].value)
    np.testing.assert_array_equal(ours.predict(x, verbose=0), theirs.predict(x, verbose=0))
    ours.optimizer.apply([keras.ops.zeros(variable.shape) for variable in ours.trainable_variables])


def case_run_calls_the_function():
    on = distribute.OneDeviceStrategy("cpu")
    assert (on.num_replicas_in_sync, on.cluster_resolver) == (1, None)

    def step(x):
        replica = distribute.get_replica_context()
        assert replica.replica_id_in_sync_group == 0
        rows = replica.all_gather(x, axis=0)
        return replica.all_reduce("MEAN", rows), replica.merge_call(lambda on, x: on.reduce("SUM", x, axis=0), (x,))

    x = keras.ops.convert_to_tensor(np.arange(6.0, dtype="float32").reshape(3, 2))
    rows, total = on.run(step, args=(x,))
    assert "cpu" in device_of(rows)
    assert [device_of(rows)] == [each.lower() for each in on.extended.parameter_devices]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(rows), np.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(total), [6, 9])
    assert float(on.reduce("MEAN", x, axis=0)[0]) == 2
    assert tuple(on.gather(x, axis=1).shape) == (3, 2)


def case_a_missing_device_is_an_error():
    with pytest.raises(ConfigError, match=f"{BACKEND} has no such device. It has cpu:0"):
        distribute.OneDeviceStrategy("/gpu:7")
    with pytest.raises(ConfigError, match="not a device name"):
        distribute.OneDeviceStrategy("over there!")


def case_the_default_strategy():
    default = distribute.get_strategy()
    assert default is distribute.get_strategy()
    assert (default.num_replicas_in_sync, distribute.has_strategy()) == (1, False)
    assert default.run(lambda x: distribute.get_replica_context().all_reduce("SUM", x), args=(2,)) == 2
    assert default.reduce("SUM", 2, axis=None) == 2
    with default.scope():
        model().fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    with distribute.OneDeviceStrategy("cpu").scope() as on:
        assert distribute.get_strategy() is on
        with pytest.raises(StrategyError, match="another strategy"), distribute.OneDeviceStrategy("cpu").scope():
            pass
