"""The environment of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]

#: XLA's optimizations of these small models take longer than the models.
QUICK = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
#: For processes that chorosrun does not start: their threads would wait for each other's cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Caches every compilation, however short: cases compile the same models again and again.
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
#: Ranks run pytest without those of other packages, which it would import.
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def python_path() -> str:
    """The ``PYTHONPATH`` with which processes started by tests can import modules of tests."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def hiding_path(*hidden: str) -> str:
    """The ``PYTHONPATH`` of processes that do not find these frameworks, which Keras would import, in seconds."""
    directories = [str(TESTS / f"hidden_{name}") for name in hidden]
    return os.pathsep.join([*directories, *filter(None, [os.environ.get("PYTHONPATH")])])
