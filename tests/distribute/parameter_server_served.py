"""The script of a job whose workers and servers serve from the beginning; the last ones are in the chief's process."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np

from choros import distribute
from choros.distribute.partitioners import MinSizePartitioner
from distribute import parameter_server_common as common
from distribute.parameter_server_common import CLUSTER, SHARD, TASK, X, Y, assert_close, network, train
from distribute.parameter_server_jobs import GATE

resolver = distribute.cluster_resolver.TFConfigClusterResolver()
if TASK["type"] in ("worker", "ps"):
    if TASK["index"] == 0:
        distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol=resolver.rpc_layer or "grpc",
            start=True,
        ).join()
    sys.exit(0)

Path(GATE.format("parameter_server_served", "worker", "1.1")).touch()
for role in ("worker", "ps"):
    distribute.Server(CLUSTER, role, 1)
strategy = distribute.ParameterServerStrategy(resolver, MinSizePartitioner(SHARD, max_shards=3))


def case_workers_and_servers_in_processes_of_their_own_and_in_the_chiefs():
    with strategy.scope():
        model = network(40, keras.optimizers.Adam(0.01), norm=True)
    losses = train(model, epochs=6).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    coordinator = distribute.coordinator.ClusterCoordinator(strategy)
    common.admit_worker("parameter_server_served", coordinator, "0.1")
    weights = coordinator.fetch([coordinator.schedule(model.get_weights) for _ in range(4)])
    for each in weights:
        assert_close(each, model.get_weights())
    evaluated = coordinator.fetch([coordinator.schedule(lambda: model.test_on_batch(X, Y)[0]) for _ in range(4)])
    np.testing.assert_allclose(evaluated, model.evaluate(X, Y, verbose=0)[0], rtol=1e-3)


if __name__ == "__main__":
    common.run_cases(dict(globals()))
