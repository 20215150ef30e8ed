"""Device names in TensorFlow's notation, on every framework."""

import re
import sys
from typing import Any

from choros.errors import ConfigError

_NAME = re.compile(r"(?:/?(?:job|replica|task):\w+)*/?(?:device:)?([a-z]+)(?::(\d+))?", re.IGNORECASE)


def device_name(name: str) -> str:
    """Returns TensorFlow's name of a device of this process as its kind and its index; ConfigError if it is none.

    >>> [device_name(name) for name in ("cpu", "/gpu:1", "/job:localhost/replica:0/task:0/device:GPU:0")]
    ['cpu:0', 'gpu:1', 'gpu:0']
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ConfigError(f"{name!r} is not a device name: write 'cpu', '/gpu:0' or 'GPU:1'.")
    kind = match[1].lower()
    return f"{'gpu' if kind == 'cuda' else kind}:{int(match[2] or 0)}"


def devices_of(framework: str) -> list[str]:
    """Returns the names of this process's devices that ``framework`` can use; this initialises the framework."""
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return [device_name(device.name) for device in tf.config.list_logical_devices()]
        case "torch":
            import torch

            count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
            return ["cpu:0", *(f"gpu:{index}" for index in range(count))]
        case _:
            return list(jax_devices())


def jax_devices() -> dict[str, Any]:
    """Returns JAX's devices of this process by their names, those of the default platform first."""
    import jax

    return {
        f"{platform}:{index}": device
        for platform in dict.fromkeys((jax.default_backend(), "cpu"))
        for index, device in enumerate(jax.local_devices(backend=platform))
    }


def on_device(framework: str, device: str) -> Any:
    """Returns the block in which ``framework``, and Keras on it, creates and computes values on ``device``."""
    match framework:
        case "tensorflow":
            import tensorflow as tf

            return tf.device(f"/device:{device.upper()}")
        case "torch":
            import torch

            kind, _, index = device.partition(":")
            name = kind if kind == "cpu" else f"{torch.accelerator.current_accelerator().type}:{index}"
            if "keras" not in sys.modules:
                return torch.device(name)
            # Not torch.device: a DataLoader that shuffles would draw its random numbers on the accelerator, and fail.
            import keras

            return keras.device(name)
        case _:
            import jax

            return jax.default_device(jax_devices()[device])
