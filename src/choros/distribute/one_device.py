"""OneDeviceStrategy: one replica on one device, for testing scripts meant for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from choros.distribute.devices.names import DeviceName, devices_of, on_device
from choros.distribute.fit.local import LocalTraining
from choros.distribute.fit.training import Training
from choros.distribute.joining import framework
from choros.distribute.process_replicas import ProcessReplicas
from choros.distribute.reduce_op import ReduceOp
from choros.distribute.replicas import Axis, Replicas
from choros.distribute.strategy import Strategy
from choros.errors import ConfigError

__all__ = ["OneDeviceStrategy"]


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
        self._framework = framework()
        self._device = DeviceName.parse(device)
        known = devices_of(self._framework)
        if self._device not in known:
            raise ConfigError(
                f"OneDeviceStrategy({device!r}): {self._framework} has no such device. It has "
                f"{', '.join(map(str, known))}."
            )
        super().__init__(_OnDevice(self.placement))
        self._training = LocalTraining()

    @property
    def training(self) -> Training | None:
        """Keras' own."""
        return self._training

    def placement(self) -> AbstractContextManager[Any]:
        """Returns the block that places values on the device."""
        return on_device(self._framework, self._device)


@final
class _OnDevice(Replicas):
    """The only replica, which runs functions in the block ``placement``."""

    count = local_count = 1
    first = 0

    def __init__(self, placement: Callable[[], AbstractContextManager[Any]]) -> None:
        self._placement = placement
        self._replica = ProcessReplicas(alone=True)

    def run(
        self, strategy: Strategy, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls ``function``, on the device."""
        with self._placement():
            return self._replica.run(strategy, function, args, kwargs)

    def reduce(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """Reduces over ``axis``; with ``None``, returns the value."""
        return self._replica.reduce(op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the value."""
        return self._replica.gather(value, axis)

    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Returns the value."""
        return self._replica.all_reduce(op, value)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Returns the value."""
        return self._replica.all_gather(value, axis)

    def merge_call(
        self, strategy: Strategy, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls ``function(strategy, …)``."""
        return self._replica.merge_call(strategy, function, args, kwargs)
