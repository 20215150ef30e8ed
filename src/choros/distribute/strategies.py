"""The strategies of synchronous training: each replica has a copy of the variables, and all apply the same updates. For
users, which one is current, as ``scope.py`` draws it; outside of all scopes it is the default.

A step of CentralStorageStrategy on three processes; process 0 keeps the optimizer's state::

    process 0                process 1           process 2
    gradients ───────────────gradients ──────────gradients      (1) reduced, as by MirroredStrategy
    optimizer: m, v          no optimizer state  no optimizer state
    variables updated once                                      (2) by the optimizer of process 0
    values ─────────────────►received ──────────►received       (3) broadcast; the next step computes with them
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, final

from choros.distribute.cluster_resolver import TPUClusterResolver
from choros.distribute.job import (
    check_number,
    cluster_of,
    framework,
    join,
    on_devices,
    on_one_device,
    on_processes,
    replicas_of,
)
from choros.distribute.replicas import ProcessReplicas, ReplicaContext
from choros.distribute.scope import current_replica, current_strategy, here
from choros.distribute.strategy import Strategy
from choros.errors import ConfigError, EngineUnavailable, StrategyError
from choros.topology import Topology


def _join_on_one_host(reason: str) -> Topology:
    topology = join()
    if topology.cross_size > 1:
        raise StrategyError(
            f"{reason}, and this job runs on {topology.cross_size}: use MultiWorkerMirroredStrategy, which is for any "
            "number of hosts, or ParameterServerStrategy."
        )
    return topology


@final
class MirroredStrategy(Strategy):
    """Synchronous training on one host: every replica has a copy of the variables and applies the same updates.

    Under ``chorosrun -np N`` each of the N processes is a replica, with its own device. On JAX a process that was
    started alone, such as a notebook, uses all its devices.

    Args:
        devices: the devices to use in a process that was started alone on JAX, such as ``["gpu:0", "gpu:1"]``; ``None``
            for all. Under ``chorosrun`` each process has one device, and only the number of devices counts.
        cross_device_ops: has no effect; the engine decides how to reduce.
        shard_state: whether each process has a slice of the optimizer's state only, and updates the weights in it: see
            docs/shard-state.md. ``None``: as ``chorosrun --shard-state`` says.

    Raises:
        ConfigError: a device does not exist, or the number of processes differs; or ``shard_state`` is given to devices
            of one process.
        StrategyError: the job has several hosts.

    Example:
        >>> from choros import distribute
        >>> strategy = distribute.MirroredStrategy()
        >>> with strategy.scope():
        ...     pass  # model = …; model.compile(…)
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self, devices: Sequence[str] | None = None, cross_device_ops: Any = None, shard_state: bool | None = None
    ) -> None:
        topology = _join_on_one_host("MirroredStrategy is for the replicas of one host")
        super().__init__(*replicas_of(topology, devices, shard_state))


@final
class MultiWorkerMirroredStrategy(Strategy):
    """``MirroredStrategy`` over any number of hosts.

    Processes are started by ``chorosrun -np N -H host1:4,host2:4``, by ``srun``, or by hand on each host with
    ``TF_CONFIG``, which lists the workers' addresses. Started by hand, PyTorch alone sends the
    gradients, and mpirun is not needed.

    Args:
        cluster_resolver: provides the workers' addresses where no launcher does; ``None`` reads ``TF_CONFIG``.
        communication_options: has no effect; the engine decides how values are sent.
        shard_state: as for ``MirroredStrategy``.

    Raises:
        ConfigError: ``TF_CONFIG`` is invalid.
        EngineUnavailable: a worker did not connect in time.

    Example:
        >>> from choros import distribute
        >>> distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync
        1
    """

    def __init__(
        self, cluster_resolver: Any = None, communication_options: Any = None, shard_state: bool | None = None
    ) -> None:
        topology = join(cluster_resolver)
        resolver = cluster_of(topology) if cluster_resolver is None else cluster_resolver
        super().__init__(*replicas_of(topology, shard_state=shard_state), resolver)


@final
class CentralStorageStrategy(Strategy):
    """Synchronous training on one host, in which one process keeps the optimizer's state and applies each update.

    The other replicas save the memory of that state: with Adam twice that of the variables. Every replica has a copy of
    the variables, as in ``tf.distribute`` each device has while it computes.

    Args:
        compute_devices: as in ``tf.distribute``. Each process that ``chorosrun`` starts is a replica here, so only the
            number of devices counts.
        parameter_device: has no effect; it is the device of process 0.

    Raises:
        ConfigError: ``compute_devices`` has another length than the number of processes.
        StrategyError: the job has several hosts.
    """

    def __init__(self, compute_devices: Sequence[str] | None = None, parameter_device: str | None = None) -> None:
        topology = _join_on_one_host("CentralStorageStrategy keeps variables on one host")
        check_number("compute_devices", compute_devices, topology)
        super().__init__(*on_processes(state_owner=0))


@final
class TPUStrategy(Strategy):
    """Synchronous training on TPUs, through JAX (``tf.distribute.TPUStrategy``).

    A process that was started alone uses all TPUs of its host. Several processes, started by ``chorosrun`` or ``srun``,
    each have their own TPUs (docs/engines.md, "xla").

    Args:
        tpu_cluster_resolver: a ``TPUClusterResolver``, whose ``tpu_devices()`` returns the TPUs; ``None`` creates one.
        experimental_device_assignment: must be ``None``: each replica has one device.
        experimental_spmd_xla_partitioning: must be ``False``: models are not partitioned.

    Raises:
        EngineUnavailable: the host has no TPU, or the framework is not JAX.
        ConfigError: an argument requests replicas of several devices.
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        if experimental_device_assignment is not None or experimental_spmd_xla_partitioning:
            raise ConfigError(
                "TPUStrategy trains a whole model on each device: leave experimental_device_assignment and "
                "experimental_spmd_xla_partitioning out, or shard the model with keras.distribution.ModelParallel."
            )
        if (used := framework()) != "jax":
            raise EngineUnavailable(
                f"TPUStrategy uses TPUs through JAX, but the framework is {used}: set KERAS_BACKEND=jax before "
                "keras is imported, and pip install 'jax[tpu]'."
            )
        resolver = TPUClusterResolver() if tpu_cluster_resolver is None else tpu_cluster_resolver
        topology = join()
        devices = resolver.tpu_devices()
        if topology.size == 1 and len(devices) > 1:
            super().__init__(*on_devices(devices), resolver)
        else:
            super().__init__(*on_processes(), resolver)


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device, which joins no job (``tf.distribute.OneDeviceStrategy``).

    Variables created in its scope, ``fit`` of its models, and functions run by ``run`` are on the device.

    Args:
        device: its name in TensorFlow's notation: ``"/cpu:0"``, ``"GPU:1"``, ``"/device:TPU:0"``, ``"cpu"``. On
            PyTorch, ``gpu`` is the accelerator of any kind.

    Raises:
        ConfigError: the framework has no such device.

    Example:
        >>> from choros import distribute
        >>> strategy = distribute.OneDeviceStrategy("/cpu:0")
        >>> strategy.run(lambda x: x + 1, args=(1,))
        2
    """

    def __init__(self, device: str) -> None:
        super().__init__(*on_one_device(device))


@final
class DefaultStrategy(Strategy):
    """One replica, on the framework's default device; models created in its scope train as without a strategy."""

    is_default = True

    def __init__(self) -> None:
        super().__init__(ProcessReplicas(alone=True), training=None)


_default_strategy = cache(DefaultStrategy)


def get_strategy() -> Strategy:
    """Returns the strategy in whose scope the program is; outside of all, the default one, which has one replica.

    Example:
        >>> from choros import distribute
        >>> distribute.get_strategy()
        DefaultStrategy(1 replicas)
    """
    strategy: Strategy = current_strategy() or _default_strategy()
    return strategy


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the current replica; ``None`` in cross-replica context.

    Outside of all scopes, it is that of the one replica of the default strategy.

    Example:
        >>> from choros import distribute
        >>> distribute.OneDeviceStrategy("cpu").run(lambda: distribute.get_replica_context().num_replicas_in_sync)
        1
    """
    if current_strategy() is None:
        return ReplicaContext(_default_strategy(), 0)
    replica: ReplicaContext | None = current_replica()
    return replica


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Enters the scope of ``strategy`` until the next call, for notebooks, where a block cannot span cells.

    Args:
        strategy: the one to enter; ``None`` leaves the scope.

    Raises:
        StrategyError: it was called inside ``with strategy.scope():``, or in a replica.

    Example:
        >>> from choros import distribute
        >>> distribute.experimental_set_strategy(distribute.OneDeviceStrategy("cpu"))
        >>> distribute.has_strategy()
        True
        >>> distribute.experimental_set_strategy(None)
    """
    if here.depth != here.lasting:
        raise StrategyError(
            "experimental_set_strategy was called inside a strategy's scope: call it outside of all `with` blocks."
        )
    try:
        here.leaving.close()
        if strategy is not None:
            here.leaving.enter_context(strategy.scope())
    finally:
        here.lasting = here.depth
