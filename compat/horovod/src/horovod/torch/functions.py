"""Broadcasts of parameters and of an optimizer's state, and objects between ranks."""

from choros.torch import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]
