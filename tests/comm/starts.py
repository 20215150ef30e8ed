"""Starts ranks without a launcher."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence

from harness import free_port
from ranks.environment import ONE_THREAD, QUICK, python_path

Environ = Mapping[str, str]


def by_hand(ranks: int) -> list[Environ]:
    """The environment of each rank: only the required variables."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [{**common, "RANK": str(rank)} for rank in range(ranks)]


def of_tf_config(ranks: int) -> list[Environ]:
    """The environment of each worker of a TensorFlow cluster on this host."""
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(ranks)]}
    tasks = [{"type": "worker", "index": rank} for rank in range(ranks)]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def step_of_slurm(ranks: int) -> list[Environ]:
    """The environment of each task of a SLURM job step on one host, as srun sets it without an interface for MPI."""
    common = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(free_port()),
    }
    return [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]


def together(command: Sequence[str], environs: Sequence[Environ], timeout: float = 300) -> list[tuple[int, str]]:
    """Runs ``command`` once in each environment, all at once; returns the exit codes and outputs."""
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **QUICK, **ONE_THREAD, "PYTHONPATH": python_path(), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environ in environs
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
