"""The imports of modules whose import time and memory are critical."""

import json
import subprocess
import sys
from pathlib import Path

import choros

SOURCES = Path(choros.__file__).parents[1]


def modules_after(code: str, *flags: str) -> set[str]:
    code = f"import json, sys; sys.path.append({str(SOURCES)!r}); before = set(sys.modules); {code}; "
    code += "print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_import_choros_imports_nothing_else() -> None:
    assert modules_after("import choros") == {"choros"}


def test_a_wrapper_needs_the_standard_library_and_choros() -> None:
    loaded = modules_after("import choros.launch.wrapper.wrapper", "-I", "-S")
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names - {"org"} == {"choros"}
    assert not {"hashlib", "random", "shutil", "socket", "tempfile", "ctypes"} & loaded


def test_chorosrun_imports_neither_numpy_nor_network_modules_nor_yaml() -> None:
    loaded = modules_after("import choros.launch.cli")
    heavy = {"numpy", "psutil", "mpi4py", "asyncio", "hashlib", "socket", "concurrent", "importlib.metadata", "yaml"}
    assert not heavy & loaded
