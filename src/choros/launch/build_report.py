"""The output of ``chorosrun --check-build`` and ``--version``: what is installed, without importing it."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable

from choros.launch.driver.machine import count_accelerators
from choros.launch.plan.mpi_implementations import Mpirun
from choros.settings import ENGINES

_FRAMEWORKS = {"JAX": "jax", "PyTorch": "torch", "TensorFlow": "tensorflow"}


def version_text(mpirun: Mpirun | str) -> str:
    """Returns the versions of choros, mpirun and mpi4py; ``mpirun`` is an error message if none was found."""
    mpi = mpirun if isinstance(mpirun, str) else f"{mpirun.version} ({mpirun.path})"
    python = ".".join(map(str, sys.version_info[:3]))
    return "\n".join(
        [f"choros {_version('choros')}".rstrip(), f"mpi4py {_version('mpi4py')}", f"mpirun: {mpi}", f"Python {python}"]
    )


def build_text(mpirun: Mpirun | str, installed: Callable[[str], bool] | None = None) -> str:
    """Returns a list of frameworks and engines, with ``[X]`` for installed ones; ``mpirun`` may be an error message."""
    found = installed or (lambda module: importlib.util.find_spec(module) is not None)
    lines = [f"choros {_version('choros')}".rstrip() + ":", "", "Available frameworks:"]
    lines += [_row(found(module), _label(name, module)) for name, module in _FRAMEWORKS.items()]
    lines += ["", "Available interfaces:", _row(found("keras"), _label("Keras", "keras"))]
    lines += ["", "Available engines:"]
    for name, (note, module) in ENGINES.items():
        available = (not module or found(module)) and (name != "mpi" or isinstance(mpirun, Mpirun))
        lines.append(_row(available, f"{name} ({note})" if note else name))
    lines += ["", "Available collectives on GPUs:", _row(found("nccl"), "nccl4py (NCCL)")]
    lines += [_row(found("torch"), "torch.distributed (NCCL, RCCL)")]
    lines += ["", f"Accelerators on this host: {count_accelerators()}"]
    lines += ["mpirun: " + (mpirun if isinstance(mpirun, str) else f"{mpirun.version} ({mpirun.path})")]
    return "\n".join(lines)


def _row(available: bool, label: str) -> str:
    return f"    [{'X' if available else ' '}] {label}"


def _label(name: str, module: str) -> str:
    return f"{name} {_version(module)}".rstrip()


def _version(module: str) -> str:
    """Returns the version of the distribution of ``module``: tensorflow's may be called tensorflow-cpu."""
    for distribution in (module, f"{module}-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
