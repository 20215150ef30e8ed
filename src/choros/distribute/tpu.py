"""TPUStrategy: replicas on TPUs, through JAX."""

from __future__ import annotations

from typing import Any, final

from choros.distribute.cluster_resolver.tpu import TPUClusterResolver
from choros.distribute.fit.training import Training
from choros.distribute.job_replicas import synchronous_training
from choros.distribute.joining import framework, join
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.strategy import Strategy
from choros.errors import ConfigError, EngineUnavailable

__all__ = ["TPUStrategy"]


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
            from choros.distribute.devices.replicas import on_devices

            replicas, self._training = on_devices(devices)
        else:
            replicas, self._training = ProcessReplicas(), synchronous_training()
        super().__init__(replicas, resolver)

    @property
    def training(self) -> Training | None:
        """Synchronous."""
        return self._training
