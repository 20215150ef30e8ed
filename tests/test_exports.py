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
MismatchError NoiseScale NotInitializedError ParameterServerLost PeerLostError ProcessSet StrategyError WorkerFailed
__version__
add_process_set cross_rank cross_size global_process_set init is_homogeneous is_initialized local_rank local_size
nn noise_scale rank remove_process_set run shard_range shutdown size
"""

#: What Horovod's APIs have in common.
HOROVOD = """
Adasum Average Compression HorovodInternalError Max Min ProcessSet Product Sum add_process_set allgather_object
barrier broadcast_object ccl_built cross_rank cross_size cuda_built ddl_built global_process_set gloo_built
gloo_enabled init is_homogeneous is_initialized local_rank local_size mpi_built mpi_enabled mpi_threads_supported
nccl_built rank remove_process_set rocm_built shard_range shutdown size start_timeline stop_timeline
"""

CHOROS_KERAS = """
elastic DiLoCoCallback DistributedOptimizer LocalSGDCallback PartialDistributedOptimizer
SyncBatchNormalization allgather allreduce alltoall broadcast
broadcast_global_variables broadcast_variables callbacks load_model pin_device reducescatter shard
"""

CHOROS_TORCH = """
DistributedOptimizer SyncBatchNorm allgather allgather_async allreduce allreduce_ allreduce_async allreduce_async_
alltoall alltoall_async elastic broadcast broadcast_ broadcast_async broadcast_async_ broadcast_optimizer_state
broadcast_parameters grouped_allgather grouped_allgather_async grouped_allreduce grouped_allreduce_
grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter grouped_reducescatter_async join poll
reducescatter reducescatter_async sparse_allreduce_async synchronize
"""

CHOROS_JAX = """
elastic allgather allreduce alltoall broadcast broadcast_parameters clip_by_global_norm distributed grouped_allgather
grouped_allreduce grouped_reducescatter join own_state reducescatter whole_state
"""

CHOROS_TENSORFLOW = """
elastic BroadcastGlobalVariablesHook DistributedGradientTape DistributedOptimizer LocalGradientAggregationHelper
PartialDistributedGradientTape PartialDistributedOptimizer SyncBatchNormalization allgather allreduce alltoall broadcast
broadcast_ broadcast_global_variables broadcast_object_fn broadcast_variables grouped_allgather grouped_allreduce
grouped_reducescatter join local_rank_op local_size_op process_set_included_op rank_op reducescatter size_op
"""


DISTRIBUTE = {
    "choros.distribute": """
    AutoShardPolicy HierarchicalCopyAllReduce InputContext InputOptions InputReplicationMode MirroredStrategy
    MultiWorkerMirroredStrategy NcclAllReduce OneDeviceStrategy ParameterServerStrategy PerReplica ReduceOp
    ReductionToOneDevice ReplicaContext RunOptions Server Strategy TPUStrategy cluster_resolver coordinator
    experimental experimental_set_strategy get_replica_context get_strategy has_strategy in_cross_replica_context
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
@pytest.mark.parametrize(("face", "own"), [("keras", CHOROS_KERAS), ("tensorflow", CHOROS_TENSORFLOW)])
def test_choros_keras_and_tensorflow(face: str, own: str) -> None:
    if face == "tensorflow" and face not in FRAMEWORKS:
        pytest.skip("CHOROS_TEST_FRAMEWORKS leaves out tensorflow")
    script = (
        f"import json, choros.{face} as hvd\n"
        "print(json.dumps([hvd.__all__, [name for name in hvd.__all__ if not hasattr(hvd, name)]]))"
    )
    environ = {**os.environ, "KERAS_BACKEND": FRAMEWORKS[-1]}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=True, stdout=subprocess.PIPE, timeout=300)
    names, missing = json.loads(done.stdout)
    assert sorted(names) == sorted((HOROVOD + own).split())
    assert missing == []


def test_choros_torch() -> None:
    pytest.importorskip("torch")
    import choros.torch as hvd

    assert sorted(hvd.__all__) == sorted((HOROVOD + CHOROS_TORCH).split())
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


def test_choros_jax() -> None:
    pytest.importorskip("jax")
    import choros.jax as hvd

    assert sorted(hvd.__all__) == sorted((HOROVOD + CHOROS_JAX).split())
    assert [name for name in hvd.__all__ if not hasattr(hvd, name)] == []


@pytest.mark.parametrize("module", DISTRIBUTE)
def test_distribute(module: str) -> None:
    imported = importlib.import_module(module)
    assert imported.__all__ == DISTRIBUTE[module].split()
    assert [name for name in imported.__all__ if not hasattr(imported, name)] == []


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'choros' has no attribute 'all_reduce'$"):
        choros.all_reduce  # noqa: B018


def test_a_name_of_a_face_says_which_without_importing_one() -> None:
    tables = {"keras": CHOROS_KERAS, "torch": CHOROS_TORCH, "jax": CHOROS_JAX, "tensorflow": CHOROS_TENSORFLOW}
    faces = {face: (HOROVOD + own).split() for face, own in tables.items()}
    faces["distribute"] = DISTRIBUTE["choros.distribute"].split()
    script = (
        "import choros, json, sys\n"
        "asked = json.load(sys.stdin)\n"
        "said = {}\n"
        "for name in {name for names in asked.values() for name in names} - {*choros.__all__}:\n"
        "    try: getattr(choros, name)\n"
        "    except AttributeError as error: said[name] = str(error)\n"
        "assert not {'tensorflow', 'torch', 'jax', 'keras', 'numpy'} & {*sys.modules}\n"
        "print(json.dumps(said))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(faces), check=True, capture_output=True, text=True, timeout=60
    )
    said = json.loads(done.stdout)
    assert said["sparse_allreduce_async"].endswith("attribute 'sparse_allreduce_async'. It is in choros.torch")
    for name, message in said.items():
        for face, names in faces.items():
            assert (f"choros.{face}" in message.split(". It is in ")[-1].split(", ")) == (name in names), message
