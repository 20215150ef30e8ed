"""Who am I, and which part is mine. Pure functions."""

from choros.topology.environments import ENVIRONMENTS, Environment, detect
from choros.topology.shard import shard_range
from choros.topology.topology import Topology

__all__ = ["ENVIRONMENTS", "Environment", "Topology", "detect", "shard_range"]
