import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from harness import ROOT, skip_if_left_out

HEAVY = {"tensorflow", "torch", "jax", "keras", "grain", "mpi4py"}


def test_import_contracts_hold() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_a_locale_that_is_not_utf_8() -> None:
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", "from choros import durations"], env=environ, check=True)


def test_no_import_cycles() -> None:
    graph = grimp.build_graph("choros", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules of one


def test_names_that_are_imported_elsewhere_exist() -> None:
    missing = []
    for path in (path for folder in ("benchmarks", "compat", "examples") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
            if module.partition(".")[0] == "choros":
                base = ROOT / "src" / Path(*module.split("."))
                home = next((each for each in (base.with_suffix(".py"), base / "__init__.py") if each.exists()), None)
                text = "" if home is None else home.read_text()
                names = [each.name for each in node.names if home is None or each.name != "*"]
                known = [name for name in names if re.search(rf"\b{name}\b|import \*", text)]
                modules = [name for name in names if (base / f"{name}.py").exists()]
                missing += [f"{path}: {module}.{name}" for name in names if name not in (*known, *modules)]
    assert missing == []


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


@pytest.mark.parametrize(
    ("script", "loads"),
    [
        ("import choros.distribute, choros.distribute.experimental", []),
        ("import choros.launch.cli, choros.cli", []),
        ("import choros; choros.init(); choros.shutdown()", []),
        ("from choros.distribute import ParameterServerStrategy", ["parameter_server"]),
        ("import choros.distribute as d; d.coordinator.ClusterCoordinator", ["parameter_server"]),
        ("import choros.distribute as d; d.experimental.partitioners.MinSizePartitioner", []),
    ],
)
def test_parameter_servers_and_instruments_are_loaded_only_when_used(script: str, loads: list[str]) -> None:
    check = (
        "\nimport sys; rooms = {name.split('.')[1] for name in sys.modules if name.startswith('choros.')}"
        "\nprint(*rooms & {'parameter_server', 'bench', 'doctor', 'report', 'trace'})"
    )
    done = subprocess.run([sys.executable, "-c", script + check], check=True, timeout=300, stdout=subprocess.PIPE)
    assert done.stdout.decode().split() == loads


@pytest.mark.slow
def test_another_thread_imports_tensorflow_while_a_server_begins() -> None:
    skip_if_left_out("tensorflow")
    script = """
import sys
from concurrent.futures import ThreadPoolExecutor
from choros.distribute.replicas import leave_unconverted

def leave():
    while "tensorflow" not in sys.modules:
        pass
    leave_unconverted()

with ThreadPoolExecutor() as pool:
    left = pool.submit(leave)
    import tensorflow
    left.result()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
