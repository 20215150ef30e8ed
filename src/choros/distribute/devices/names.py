"""Device names in TensorFlow's notation, on every framework."""

from __future__ import annotations

import re
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from choros.errors import ConfigError

Block: TypeAlias = AbstractContextManager[Any]

_NAME = re.compile(r"(?:/?(?:job|replica|task):\w+)*/?(?:device:)?([a-z]+)(?::(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class DeviceName:
    """A device of this process: ``"cpu"``, ``"gpu"`` or ``"tpu"``, and its index among those.

    >>> [str(DeviceName.parse(name)) for name in ("cpu", "/gpu:1", "/job:localhost/replica:0/task:0/device:GPU:0")]
    ['cpu:0', 'gpu:1', 'gpu:0']
    """

    kind: str
    index: int

    @classmethod
    def parse(cls, name: str) -> DeviceName:
        """Parses ``name``; ConfigError if it is not a device name."""
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise ConfigError(f"{name!r} is not a device name: write 'cpu', '/gpu:0' or 'GPU:1'.")
        kind = match[1].lower()
        return cls("gpu" if kind == "cuda" else kind, int(match[2] or 0))

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def devices_of(framework: str) -> tuple[DeviceName, ...]:
    """Returns the devices of this process that ``framework`` can use; this initialises the framework."""
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return tuple(DeviceName.parse(device.name) for device in tf.config.list_logical_devices())
        case "torch":
            import torch

            count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
            return (DeviceName("cpu", 0), *(DeviceName("gpu", index) for index in range(count)))
        case _:
            return tuple(jax_devices())


def jax_devices() -> dict[DeviceName, Any]:
    """Returns JAX's devices of this process, those of the default platform first."""
    import jax

    platforms = dict.fromkeys((jax.default_backend(), "cpu"))
    return {
        DeviceName(platform, index): device
        for platform in platforms
        for index, device in enumerate(jax.local_devices(backend=platform))
    }


def on_device(framework: str, device: DeviceName) -> Block:
    """Returns the block in which ``framework``, and Keras on it, creates and computes values on ``device``."""
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return cast("Block", tf.device(f"/device:{device.kind.upper()}:{device.index}"))
        case "torch":
            import torch

            kind = "cpu" if device.kind == "cpu" else torch.accelerator.current_accelerator().type
            name = kind if kind == "cpu" else f"{kind}:{device.index}"
            if "keras" not in sys.modules:
                return cast("Block", torch.device(name))
            # Not torch.device: a DataLoader that shuffles would draw its random numbers on the accelerator, and fail.
            import keras

            return cast("Block", keras.device(name))
        case _:
            import jax

            return cast("Block", jax.default_device(jax_devices()[device]))
