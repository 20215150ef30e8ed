"""What docs/spark.md says: its programs run as written, and ``import choros`` loads nothing of Spark."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from docs.programs import DOCS, blocks

#: Fragments, which show calls without what they are about.
FRAGMENTS = ("What happens when an executor goes",)


@pytest.mark.spark
@pytest.mark.nightly
@pytest.mark.xdist_group("spark")
def test_the_programs_of_the_page(tmp_path):
    codes = [code for heading, code in blocks((DOCS / "spark.md").read_text()) if heading not in FRAGMENTS]
    program = tmp_path / "program.py"
    program.write_text("\n".join([*codes, "spark.stop()"]).replace('"/tmp/', f'"{tmp_path}/'))
    environ = {**os.environ, "KERAS_BACKEND": "torch", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "label__output" in done.stdout


def test_nothing_of_spark_is_loaded():
    check = "import sys, choros, choros.spark; print({'pyspark', 'pyarrow', 'pandas', 'py4j'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
