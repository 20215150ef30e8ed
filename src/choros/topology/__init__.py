"""The rank and size of this process, from its environment, and its share of data. Pure functions."""

from choros.topology.environments import (
    ENVIRONMENTS,
    NEVER_MPI,
    WITHOUT_MPI,
    Master,
    detect,
    expand_counts,
    expand_hosts,
    find_master,
)
from choros.topology.tf_config import TF_CONFIG, TFConfig, read_tf_config, split_address
from choros.topology.topology import Topology, shard_range
