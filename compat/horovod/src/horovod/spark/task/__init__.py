"""The accelerators of a rank are choros' answer."""

from choros.spark import get_available_devices

__all__ = ["get_available_devices"]
