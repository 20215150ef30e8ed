"""The resolver of the TPUs that JAX finds."""

from __future__ import annotations

from typing import Any, final

from choros.distribute.cluster_resolver.resolver import ClusterResolver, ClusterSpec
from choros.errors import EngineUnavailable


@final
class TPUClusterResolver(ClusterResolver):
    """Returns the TPUs that JAX has found: tf.distribute.cluster_resolver.TPUClusterResolver.

    TensorFlow needs a resolver to reach TPUs over the network. JAX finds the TPUs of its host itself, so a script needs
    no resolver, and code that connects TensorFlow to TPUs can be removed.

    Args:
        tpu: TensorFlow's name of a TPU; has no effect.
        kwargs: TensorFlow's other arguments; have no effect.

    Example:
        >>> TPUClusterResolver("").cluster_spec().jobs
        []
    """

    def __init__(self, tpu: str | None = None, **kwargs: Any) -> None:
        del tpu, kwargs

    @classmethod
    def connect(cls, tpu: str | None = None, **kwargs: Any) -> TPUClusterResolver:
        """Returns a resolver, after checking that there are TPUs.

        Raises:
            EngineUnavailable: there are no TPUs.
        """
        resolver = cls(tpu, **kwargs)
        resolver.tpu_devices()
        return resolver

    def tpu_devices(self) -> list[Any]:
        """Returns JAX's devices of this process; initialises JAX.

        Raises:
            EngineUnavailable: they are not TPUs.
        """
        import jax

        devices = jax.local_devices()
        if devices[0].platform != "tpu":
            names = ", ".join(f"{device.platform}:{device.local_hardware_id or device.id}" for device in devices)
            raise EngineUnavailable(
                f"this process has no TPU: JAX {jax.__version__} runs on the platform {devices[0].platform!r} and has "
                f"found {names}. On a host with TPUs: pip install 'jax[tpu]'. On other hosts use MirroredStrategy, "
                "which uses all devices."
            )
        return list(devices)

    def cluster_spec(self) -> ClusterSpec:
        """Returns a specification without jobs: the launcher provides the processes' addresses."""
        return ClusterSpec({})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Empty."""
        del task_type, task_id, rpc_layer
        return ""

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The TPUs of this process."""
        del task_type, task_id, config_proto
        return {"TPU": len(self.tpu_devices())}
