"""Placement groups of Ray's."""

from choros.ray.placement import create_placement_group

__all__ = ["create_placement_group"]
