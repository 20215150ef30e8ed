"""The rank and size of this process, from its environment, and its share of data. Pure functions."""

from choros.topology.environments import ENVIRONMENTS, WITHOUT_MPI, Environment, detect, expand_counts
from choros.topology.master import Master, find_master
from choros.topology.shard import shard_range
from choros.topology.tf_config import TF_CONFIG, TFConfig, read_tf_config, split_address
from choros.topology.topology import Topology

__all__ = [
    "ENVIRONMENTS",
    "TF_CONFIG",
    "WITHOUT_MPI",
    "Environment",
    "Master",
    "TFConfig",
    "Topology",
    "detect",
    "expand_counts",
    "find_master",
    "read_tf_config",
    "shard_range",
    "split_address",
]
