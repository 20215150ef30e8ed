"""Placement groups of Ray's."""

from choros.ray.worker import create_placement_group

__all__ = ["create_placement_group"]
