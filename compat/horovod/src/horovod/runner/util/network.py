"""Addresses of this host."""

from choros.transport.address import outward_address

__all__ = ["get_driver_ip"]


def get_driver_ip(nics: object = None) -> str:
    """An address of this host, at which others reach it."""
    return outward_address()
