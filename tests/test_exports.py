"""The public names. A name added to the library must be added here."""

import importlib
import json
import os
import subprocess
import sys

import pytest

import choros
from harness import FRAMEWORKS

CHOROS = """
ChorosError ClosureCancelled ConfigError EngineError EngineUnavailable HostUnreachable JobTimeout LaunchError
MismatchError NotInitializedError ParameterServerLost ProcessSet StrategyError WorkerFailed __version__
add_process_set cross_rank cross_size global_process_set init is_homogeneous is_initialized local_rank local_size
nn rank remove_process_set run shard_range shutdown size
"""

CHOROS_KERAS = """
Average Compression DiLoCoCallback DistributedOptimizer LocalSGDCallback Max Min ProcessSet Product Sum
SyncBatchNormalization add_process_set allgather allgather_object allreduce alltoall barrier broadcast
broadcast_global_variables broadcast_object broadcast_variables callbacks cross_rank cross_size global_process_set
init is_homogeneous is_initialized load_model local_rank local_size pin_device rank reducescatter remove_process_set
shard shard_range shutdown size
"""

CHOROS_TORCH = """
Average Compression DistributedOptimizer Max Min ProcessSet Product Sum add_process_set allgather allgather_object
allreduce allreduce_ allreduce_async allreduce_async_ alltoall barrier broadcast broadcast_ broadcast_object
broadcast_optimizer_state broadcast_parameters cross_rank cross_size global_process_set grouped_allreduce init
is_homogeneous is_initialized join local_rank local_size poll rank reducescatter remove_process_set shard_range
shutdown size synchronize
"""


DISTRIBUTE = {
    "choros.distribute": """
    AutoShardPolicy HierarchicalCopyAllReduce InputContext InputOptions MirroredStrategy MultiWorkerMirroredStrategy
    NcclAllReduce OneDeviceStrategy ParameterServerStrategy PerReplica ReduceOp ReductionToOneDevice ReplicaContext
    RunOptions Server Strategy TPUStrategy cluster_resolver coordinator experimental experimental_set_strategy
    get_replica_context get_strategy has_strategy in_cross_replica_context
    """,
    "choros.distribute.experimental": """
    CentralStorageStrategy CollectiveCommunication CommunicationImplementation CommunicationOptions KerasCheckpoint
    MultiWorkerMirroredStrategy ParameterServerStrategy PreemptionCheckpointHandler TPUStrategy TerminationConfig
    ValueContext coordinator partitioners
    """,
    "choros.distribute.cluster_resolver": """
    ClusterResolver ClusterSpec KubernetesClusterResolver KubernetesExecutableLocation SimpleClusterResolver
    SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver tf_config_of
    """,
    "choros.distribute.coordinator": """
    ClusterCoordinator PerWorkerDataset PerWorkerValues RemoteValue
    """,
    "choros.distribute.partitioners": """
    FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner
    """,
}


def test_choros() -> None:
    assert choros.__all__ == CHOROS.split()
    assert [name for name in choros.__all__ if not hasattr(choros, name)] == []


@pytest.mark.slow
def test_choros_keras() -> None:
    script = (
        "import json, choros.keras as hvd\n"
        "print(json.dumps([hvd.__all__, [name for name in hvd.__all__ if not hasattr(hvd, name)]]))"
    )
    environ = {**os.environ, "KERAS_BACKEND": FRAMEWORKS[-1]}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=True, stdout=subprocess.PIPE, timeout=300)
    assert json.loads(done.stdout) == [CHOROS_KERAS.split(), []]


def test_choros_torch() -> None:
    pytest.importorskip("torch")
    import choros.torch as hvd

    assert hvd.__all__ == CHOROS_TORCH.split()
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


@pytest.mark.parametrize("module", DISTRIBUTE)
def test_distribute(module: str) -> None:
    imported = importlib.import_module(module)
    assert imported.__all__ == DISTRIBUTE[module].split()
    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'choros' has no attribute 'allreduce_async'"):
        choros.allreduce_async  # noqa: B018
