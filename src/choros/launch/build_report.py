"""What ``chorosrun --check-build`` and ``--version`` print: what is installed, without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable

from choros.launch.driver.accelerators import count_accelerators
from choros.launch.plan.mpi_implementations import Mpirun

__all__ = ["build_text", "version_text"]

_FRAMEWORKS = {"JAX": "jax", "PyTorch": "torch", "TensorFlow": "tensorflow"}


def version_text(mpirun: Mpirun | str) -> str:
    """The versions of choros, mpirun and mpi4py; ``mpirun`` is a sentence where there is none."""
    mpi = mpirun if isinstance(mpirun, str) else f"{mpirun.version} ({mpirun.path})"
    python = ".".join(map(str, sys.version_info[:3]))
    return "\n".join(
        [f"choros {_version('choros')}".rstrip(), f"mpi4py {_version('mpi4py')}", f"mpirun: {mpi}", f"Python {python}"]
    )


def build_text(mpirun: Mpirun | str, installed: Callable[[str], bool] | None = None) -> str:
    """A matrix of frameworks and engines: ``[X]`` for what is there.

    Args:
        mpirun: the mpirun that would be used, or a sentence where there is none.
        installed: whether a module can be imported.
    """
    there = installed or (lambda module: importlib.util.find_spec(module) is not None)
    mpi = there("mpi4py") and isinstance(mpirun, Mpirun)
    lines = [f"choros {_version('choros')}".rstrip() + ":", "", "Available frameworks:"]
    lines += [_row(there(module), _label(name, module)) for name, module in _FRAMEWORKS.items()]
    lines += ["", "Available faces:", _row(there("keras"), _label("Keras", "keras"))]
    lines += ["", "Available engines:", _row(True, "local (one process)"), _row(mpi, "mpi")]
    lines += [_row(there("torch"), "torch (Gloo, NCCL)"), _row(there("jax"), "xla (JAX)")]
    lines += ["", f"Accelerators on this host: {count_accelerators()}"]
    lines += ["mpirun: " + (mpirun if isinstance(mpirun, str) else f"{mpirun.version} ({mpirun.path})")]
    return "\n".join(lines)


def _row(there: bool, label: str) -> str:
    return f"    [{'X' if there else ' '}] {label}"


def _label(name: str, module: str) -> str:
    return f"{name} {_version(module)}".rstrip()


def _version(module: str) -> str:
    """The version of what provides ``module``: tensorflow's may be called tensorflow-cpu."""
    for distribution in (module, f"{module}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
