"""Runs scripts of this directory in one process, each in a folder of its name: ``python run.py NAME …``."""

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent

start = Path.cwd()
for name in sys.argv[1:]:
    print(f"# {name}", flush=True)
    folder = start / name
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
