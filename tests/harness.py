"""Runs many cases on real ranks with one launch.

A *case* is a function ``case_…()`` of a module under ``tests``; every rank calls it between ``choros.init()``
and the end. ``run_cases`` starts the module on so many ranks and gives each case's errors, so that each case
is a test of its own at the price of one start of MPI and the framework.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
FRAMEWORKS = os.environ.get("CHOROS_TEST_FRAMEWORKS", "tensorflow torch jax").split()
#: Beside the Python that runs the tests.
#: Warnings that Keras gives without us: of its own use of NumPy with torch, and of data of unknown length.
NOT_OURS = ("__array__ implementation doesn't accept a copy", "Your input ran out of data")
CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))


def case_names(module: str) -> list[str]:
    """The cases of a module, read without importing it: it may need a framework."""
    source = (TESTS / (module.replace(".", "/") + ".py")).read_text()
    return [line[4:].split("(")[0] for line in source.splitlines() if line.startswith("def case_")]


@functools.cache
def run_cases(module: str, ranks: int, framework: str = "", cases: tuple[str, ...] = ()) -> Mapping[str, str]:
    """The cases of ``module`` on ``ranks`` ranks: ``""``, or the tracebacks of the ranks that failed.

    Args:
        module: below ``tests``, such as ``"comm.collective_cases"``.
        ranks: how many processes.
        framework: Keras' backend, if the module needs one.
        cases: which; all if none is named.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [CHOROSRUN, "-np", str(ranks), sys.executable, str(TESTS / "harness.py"), module, str(report), *cases]
        # XLA's optimizations of these small models take longer than the models.
        quick = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        environ = {**os.environ, **quick, "PYTHONPATH": str(TESTS)}
        if framework:
            environ["KERAS_BACKEND"] = framework
        done = subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return json.loads(report.read_text())


def check_case(module: str, ranks: int, case: str, framework: str = "", cases: tuple[str, ...] = ()) -> None:
    """Fails if ``case`` did on any rank; see ``run_cases``."""
    errors = run_cases(module, ranks, framework, cases)[case]
    assert not errors, f"\n{errors}"


def _run_here(case: Callable[[], None]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in NOT_OURS:
                warnings.filterwarnings("ignore", text)
            case()
    except Exception:  # noqa: BLE001  (all that may go wrong is the result)
        traceback.print_exc()  # The other ranks may never come to where results are gathered.
        return traceback.format_exc()
    return ""


def main(module: str, report: str, *chosen: str) -> None:
    """What each rank does."""
    import choros
    from choros.parallel.objects import allgather_object

    cases = {
        name: function
        for name, function in inspect.getmembers(importlib.import_module(module), inspect.isfunction)
        if name.startswith("case_")
    }
    choros.init()
    errors: dict[str, str] = {}
    for name in chosen or case_names(module):
        begin = time.perf_counter()
        texts = allgather_object(_run_here(cases[name]))
        print(f"{name}: {time.perf_counter() - begin:.1f} s")
        errors[name] = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    if choros.rank() == 0:
        Path(report).write_text(json.dumps(errors))


if __name__ == "__main__":
    main(*sys.argv[1:])
