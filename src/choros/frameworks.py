"""The installed frameworks, and Keras' choice: that in ``KERAS_BACKEND``, else TensorFlow, whether or not installed.
choros sets the variable before Keras is imported where only one framework is installed.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FRAMEWORKS = ("tensorflow", "torch", "jax")
_VARIABLE = "KERAS_BACKEND"


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is imported, and has no spec
        return True


def installed() -> list[str]:
    """Returns the frameworks that are installed, without importing them."""
    return list(filter(is_installed, FRAMEWORKS))


def choose_keras_backend() -> None:
    """Sets ``KERAS_BACKEND`` to the only framework that is installed, if it is not set and Keras is not imported."""
    if "keras" not in sys.modules and not os.environ.get(_VARIABLE) and len(found := installed()) == 1:
        os.environ[_VARIABLE] = found[0]


def keras_backend_of_ranks(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns ``KERAS_BACKEND`` for ranks that run this Python, if only one framework is installed; empty otherwise."""
    if environ.get(_VARIABLE) or not runs_here(command, environ):
        return {}
    found = installed()
    return {_VARIABLE: found[0]} if len(found) == 1 else {}


def runs_here(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Returns whether ``command`` is a program of this Python's environment, and so has its packages."""
    program = shutil.which(command[0], path=environ.get("PATH")) if command else None
    return program is not None and Path(program).absolute().parent == Path(sys.executable).absolute().parent


def missing_backend(error: ImportError) -> str:
    """Returns a sentence for an import of Keras that has failed with ``error``."""
    found, missing = installed(), (error.name or "").partition(".")[0]
    if missing not in FRAMEWORKS or not found:
        extras = ", ".join(f"'choros[{name}]'" for name in FRAMEWORKS[:-1]) + f" or 'choros[{FRAMEWORKS[-1]}]'"
        return f"choros needs Keras 3 and a framework: pip install {extras}."
    return (
        f"Keras computes with {missing}, which is not installed: set {_VARIABLE} to {' or '.join(found)} before the "
        "script starts."
    )
