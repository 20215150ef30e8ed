"""Who am I, and which part is mine. Pure functions."""

from choros.topology.environments import ENVIRONMENTS, WITHOUT_MPI, Environment, detect
from choros.topology.master import Master, find_master
from choros.topology.shard import shard_range
from choros.topology.topology import Topology

__all__ = ["ENVIRONMENTS", "WITHOUT_MPI", "Environment", "Master", "Topology", "detect", "find_master", "shard_range"]
