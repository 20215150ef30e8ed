"""The TPUs that JAX finds."""

from __future__ import annotations

from typing import Any, final

from choros.distribute.cluster_resolver.cluster_spec import ClusterSpec
from choros.distribute.cluster_resolver.resolver import ClusterResolver
from choros.errors import EngineUnavailable

__all__ = ["TPUClusterResolver"]


@final
class TPUClusterResolver(ClusterResolver):
    """Names nothing but what JAX has found: tf.distribute.cluster_resolver.TPUClusterResolver.

    TensorFlow needs it to reach its TPUs over the network. JAX finds those of its host by itself, so a script that has
    no resolver needs none, and the lines that connect TensorFlow to TPUs can go.

    Args:
        tpu: TensorFlow's name of a TPU; no JAX program is told one.
        kwargs: TensorFlow's other arguments; likewise.

    Example:
        >>> TPUClusterResolver("").cluster_spec().jobs
        []
    """

    def __init__(self, tpu: str | None = None, **kwargs: Any) -> None:
        del tpu, kwargs

    @classmethod
    def connect(cls, tpu: str | None = None, **kwargs: Any) -> TPUClusterResolver:
        """A resolver, if there are TPUs.

        Raises:
            EngineUnavailable: there are none.
        """
        resolver = cls(tpu, **kwargs)
        resolver.tpu_devices()
        return resolver

    def tpu_devices(self) -> list[Any]:
        """JAX's devices of this process; asking starts JAX.

        Raises:
            EngineUnavailable: they are no TPUs.
        """
        import jax

        devices = jax.local_devices()
        if devices[0].platform != "tpu":
            names = ", ".join(f"{device.platform}:{device.local_hardware_id or device.id}" for device in devices)
            raise EngineUnavailable(
                f"there is no TPU here: JAX {jax.__version__} runs on the platform {devices[0].platform!r} and has "
                f"found {names}. On a host with TPUs: pip install 'jax[tpu]'. Anywhere else use MirroredStrategy, "
                "which takes all devices."
            )
        return list(devices)

    def cluster_spec(self) -> ClusterSpec:
        """Without jobs: workers are told of each other by what starts them."""
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
