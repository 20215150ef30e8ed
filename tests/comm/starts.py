"""Starts the harness' cases on ranks without mpirun: by torchrun, or by hand with ``TF_CONFIG``."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import TESTS, case_names

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
Environ = Mapping[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tf_configs(ranks: int) -> list[Environ]:
    """The environment of each rank; all are workers of this host."""
    workers = [f"localhost:{free_port()}" for _ in range(ranks)]
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})}
        for rank in range(ranks)
    ]


def by_hand(ranks: int) -> list[Environ]:
    """The environment of each rank: as little as will do."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [{**common, "RANK": str(rank)} for rank in range(ranks)]


def together(command: Sequence[str], environs: Sequence[Environ], timeout: float = 240) -> list[tuple[int, str]]:
    """Runs ``command`` once in each environment, all at the same time; the exit codes and outputs."""
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(TESTS), **environ},
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


@functools.cache
def run_cases(module: str, starter: str, ranks: int, framework: str, cases: tuple[str, ...] = ()) -> Mapping[str, str]:
    """Like the harness' function of this name; ``starter`` is ``"torchrun"`` or ``"TF_CONFIG"``."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        words = [str(TESTS / "harness.py"), module, str(report), *(cases or case_names(module))]
        if starter == "torchrun":
            command, environs = [*TORCHRUN, f"--nproc-per-node={ranks}", *words], [{}]
        else:
            command, environs = [sys.executable, *words], tf_configs(ranks)
        ends = together(command, [{"KERAS_BACKEND": framework, **environ} for environ in environs])
        assert not any(code for code, _ in ends), "\n".join(output for _, output in ends)
        return json.loads(report.read_text())
