import json

import pytest

from choros.errors import ConfigError
from choros.topology import Topology, detect


def open_mpi(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    }


def mpich(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
    }


def torchrun(rank: int, size: int, local_rank: int, local_size: int, host: int, hosts: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(hosts),
    }


def slurm(rank: int, size: int, local_rank: int, host: int, tasks: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(host),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


#: The environment of a batch script, which is not a rank, even if the job has several tasks.
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"}


def tf_config(role: str, index: int, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


TOPOLOGIES = {
    "single process": ({}, Topology()),
    "Open MPI, one host": (open_mpi(1, 2, 1, 2), Topology(1, 2, 1, 2, 0, 1, True, "Open MPI's mpirun")),
    "Open MPI, two hosts": (open_mpi(3, 4, 1, 2), Topology(3, 4, 1, 2, 1, 2, True, "Open MPI's mpirun")),
    "Open MPI, uneven hosts": (open_mpi(0, 3, 0, 2), Topology(0, 3, 0, 2, 0, 2, False, "Open MPI's mpirun")),
    "MPICH": (mpich(5, 6, 1, 2), Topology(5, 6, 1, 2, 2, 3, True, "MPICH's mpiexec")),
    "torchrun": (torchrun(3, 4, 1, 2, 1, 2), Topology(3, 4, 1, 2, 1, 2, True, "torchrun")),
    "srun, uneven hosts": (slurm(6, 7, 0, 3, "2(x3),1"), Topology(6, 7, 0, 1, 3, 4, False, "srun")),
    "srun, not on every host": (slurm(5, 7, 1, 2, "2(x3),1"), Topology(5, 7, 1, 2, 2, 3, False, "srun")),
    "srun, cyclic, other host than block-wise": (
        slurm(1, 4, 0, 1, "2(x2)"),
        Topology(1, 4, 0, 2, 1, 2, True, "srun"),
    ),
    "srun, cyclic, same host as block-wise": (slurm(2, 8, 1, 0, "4(x2)"), Topology(2, 8, 1, 4, 0, 2, True, "srun")),
    "srun with Open MPI's interface": (
        {**slurm(1, 2, 1, 0, "2"), "PMIX_RANK": "1"},
        Topology(1, 2, 1, 2, 0, 1, True, "srun --mpi=pmix"),
    ),
    "sbatch script without srun": (SBATCH, Topology()),
    "mpirun inside SLURM": ({**SBATCH, **open_mpi(1, 2, 1, 2)}, Topology(1, 2, 1, 2, 0, 1, True, "Open MPI's mpirun")),
    "torchrun inside srun": (
        {**slurm(1, 2, 0, 1, "1(x2)"), **torchrun(5, 8, 1, 4, 1, 2)},
        Topology(5, 8, 1, 4, 1, 2, True, "torchrun"),
    ),
    "TF_CONFIG, chief is rank 0": (
        tf_config("worker", 0, chief=["a:1"], worker=["b:1", "b:2"]),
        Topology(1, 3, 0, 2, 1, 2, False, "TF_CONFIG"),
    ),
    "TF_CONFIG, same host": (
        tf_config("worker", 1, worker=["localhost:1", "localhost:2"]),
        Topology(1, 2, 1, 2, 0, 1, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, two hosts": (
        tf_config("worker", 1, worker=["a:1", "b:1"]),
        Topology(1, 2, 0, 1, 1, 2, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, master for chief": (
        tf_config("master", 0, master=["a:1"]),
        Topology(launcher="TF_CONFIG"),
    ),
    "TF_CONFIG, ps": (tf_config("ps", 0, worker=["a:1", "b:1"], ps=["b:2"]), Topology(launcher="TF_CONFIG")),
    "TF_CONFIG, evaluator": (
        {**tf_config("evaluator", 0, worker=["a:1", "b:1"]), **slurm(1, 2, 0, 1, "1(x2)")},
        Topology(launcher="TF_CONFIG"),
    ),
    "TF_CONFIG, worker beside a ps": (
        tf_config("worker", 1, worker=["a:1", "b:1"], ps=["b:2"]),
        Topology(1, 2, 0, 1, 1, 2, True, "TF_CONFIG"),
    ),
    "TF_CONFIG, empty cluster": ({"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'}, Topology()),
    "TF_CONFIG, empty": ({"TF_CONFIG": ""}, Topology()),
    "launchers that agree": (
        {**open_mpi(1, 2, 1, 2), **tf_config("worker", 1, worker=["a:1", "b:1"])},
        Topology(1, 2, 1, 2, 0, 1, True, "Open MPI's mpirun"),
    ),
}


@pytest.mark.parametrize(("environ", "topology"), TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_detect(environ: dict[str, str], topology: Topology) -> None:
    assert detect(environ) == topology


def test_ranks_distributed_cyclically_have_different_local_and_cross_ranks() -> None:
    topologies = [detect(slurm(rank, 8, rank // 2, rank % 2, "4(x2)")) for rank in range(8)]
    assert len({(topology.local_rank, topology.cross_rank) for topology in topologies}) == 8


CONTRADICTIONS = {
    "two launchers": (
        {**open_mpi(0, 2, 0, 2), **torchrun(0, 4, 0, 4, 0, 1)},
        ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2", "RANK=0", "WORLD_SIZE=4", "Unset"),
    ),
    "launcher and TF_CONFIG": (
        {**mpich(0, 2, 0, 2), **tf_config("worker", 1, worker=["a:1", "b:1"])},
        ("PMI_RANK=0", "TF_CONFIG (rank 1 of 2)"),
    ),
    "rank not below the size": (mpich(2, 2, 0, 2), ("PMI_RANK=2", "PMI_SIZE=2")),
    "negative rank": (mpich(-1, 2, 0, 2), ("PMI_RANK=-1",)),
    "local rank not below the local size": (torchrun(1, 4, 2, 2, 0, 2), ("LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2")),
    "more ranks on the host than in the job": (open_mpi(1, 2, 2, 3), ("LOCAL_SIZE=3", "WORLD_SIZE=2")),
    "not a number": ({**open_mpi(0, 2, 0, 2), "OMPI_COMM_WORLD_RANK": "one"}, ("OMPI_COMM_WORLD_RANK='one'",)),
    "empty": ({**open_mpi(0, 2, 0, 2), "OMPI_COMM_WORLD_SIZE": ""}, ("OMPI_COMM_WORLD_SIZE=''",)),
    "tasks that do not add up to the size": (
        slurm(0, 5, 0, 0, "2(x2)"),
        ("SLURM_STEP_TASKS_PER_NODE='2(x2)'", "SLURM_STEP_NUM_TASKS=5"),
    ),
    "malformed list of tasks": (slurm(0, 2, 0, 0, "2x1"), ("SLURM_STEP_TASKS_PER_NODE='2x1'", "2(x3),1")),
    "an unlisted host": (slurm(0, 2, 0, 2, "1(x2)"), ("SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE")),
    "an unlisted local rank": (
        slurm(0, 2, 1, 0, "1(x2)"),
        ("SLURM_LOCALID=1", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    "TF_CONFIG": ({"TF_CONFIG": "{"}, ("TF_CONFIG cannot be used. It is not JSON",)),
}


@pytest.mark.parametrize(("environ", "fragments"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradiction_is_an_error_that_names_the_variables(
    environ: dict[str, str], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as raised:
        detect(environ)
    assert [text for text in fragments if text not in str(raised.value)] == []
