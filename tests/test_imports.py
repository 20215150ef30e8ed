import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from harness import ROOT

HEAVY = {"tensorflow", "torch", "jax", "keras", "grain", "mpi4py"}


def test_import_contracts_hold() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_no_import_cycles() -> None:
    graph = grimp.build_graph("choros", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules of one


@pytest.mark.parametrize(
    "script",
    [
        "import choros",
        "import choros; choros.nn",
        "import choros.distribute",
        "import choros.launch.cli",
        "import choros.comm.engines.threads",
        "import choros.parallel.reduce.reducer",
        "import choros; choros.init(); from choros.parallel.objects import allgather_object as a; a(choros.rank())",
    ],
)
def test_no_framework_and_no_mpi_is_loaded_by(script: str) -> None:
    check = f"\nimport sys; loaded = {HEAVY!r} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", script + check], check=True, timeout=300)
