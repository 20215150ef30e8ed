"""How long steps wait for their data, on each framework."""

import subprocess
import sys

from harness import Job, check_case, needs, on_frameworks

CASES = "training.loading_cases"

#: The iterator is dropped after the module that lets it end in the background.
LEAVES_AN_ITERATOR = """
import tensorflow as tf
from choros.training import tensorflow_iterators

tensorflow_iterators.end_in_background()
iterator = iter(tf.data.Dataset.range(2))
"""


@on_frameworks(CASES)
def test_two_ranks(case: str, job: Job) -> None:
    check_case(CASES, case, job)


@needs("tensorflow")
def test_an_iterator_that_outlives_its_module_ends_without_a_message() -> None:
    argv = [sys.executable, "-c", LEAVES_AN_ITERATOR]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert "Exception ignored" not in done.stderr, done.stderr
