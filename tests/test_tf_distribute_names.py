"""The names and signatures of ``choros.distribute`` are those of the tables, and these are TensorFlow's."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness import TESTS, needs
from horovod_names.compare import differences

TABLES = sorted((TESTS / "tf_distribute_names").glob("*.toml"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_names_and_signatures(table: Path) -> None:
    assert list(differences(table)) == []


@pytest.mark.slow
@needs("tensorflow")
def test_tables_have_all_names_of_tensorflow() -> None:
    command = [sys.executable, TESTS / "tf_distribute_names" / "parse.py", "--check", *TABLES]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    assert done.stdout.splitlines() == []


def test_reasons_are_sentences_for_a_table() -> None:
    for table in TABLES:
        content = tomllib.loads(table.read_text())
        reasons = [*content["absent"].values(), *content["different"].values()]
        assert [reason for reason in reasons if len(reason) < 15 or "|" in reason or reason.endswith(".")] == []
