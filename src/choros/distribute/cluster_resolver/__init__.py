"""Cluster resolvers, which find the processes of a cluster: tf.distribute.cluster_resolver.

::

    from choros import distribute
    resolver = distribute.cluster_resolver.SlurmClusterResolver()
    strategy = distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)

A strategy without a resolver reads the environment, as `TFConfigClusterResolver` does; under chorosrun none is needed.
"""

from choros.distribute.cluster_resolver.resolver import (
    ClusterResolver,
    ClusterSpec,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    tf_config_of,
)
from choros.distribute.cluster_resolver.schedulers import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    SlurmClusterResolver,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "tf_config_of",
]
