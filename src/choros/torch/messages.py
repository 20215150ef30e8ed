"""Tensors, and dicts and lists of these, as messages between ranks, of which no code is run."""

import copy
import io
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from choros.errors import ConfigError


def encoded_or_refused(state: Mapping[Any, Any]) -> bytes:
    """Returns state as a message; if it cannot be saved, one that cannot be loaded: the others wait for it."""
    if not state:
        return b""
    try:
        return encoded(state)
    except Exception as error:  # noqa: BLE001 - a user's values may be any
        return str(error).encode()


def encoded(value: Any) -> bytes:
    """Returns tensors, and dicts and lists of these, as a message."""
    message = io.BytesIO()
    torch.save(on_host(value), message)
    return message.getvalue()


def decoded(message: bytes) -> Any:
    """Returns what ``encoded`` has got; it runs no code of the message."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")  # PyTorch 2.15, of its time
            return torch.load(io.BytesIO(message), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"the state of this optimizer has values that ranks cannot send one another ({error}): keep tensors, "
            "numbers, texts, and lists and dicts of these in it, or leave shard_state out."
        ) from error


def on_host(value: Any) -> Any:
    """Returns ``value`` with its tensors in host memory: other ranks and later jobs use other devices."""
    if torch.is_tensor(value):
        return value.detach().cpu()
    if isinstance(value, np.generic):  # as schedules of the learning rate make them
        return value.item()
    if isinstance(value, dict):  # a copy: a module's state has versions as an attribute
        moved = copy.copy(value)
        moved.update((key, on_host(each)) for key, each in value.items())
        return moved
    if isinstance(value, (list, tuple)):
        return getattr(value, "_make", type(value))(map(on_host, value))
    return value
