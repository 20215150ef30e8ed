"""Cases that fail; run by ``test_ranks.py``."""

import os
import signal

import pytest

import choros
from choros.parallel.ops import allreduce


def case_that_passes():
    assert allreduce(1.0) == 1.0


def case_that_is_wrong():
    position = [choros.rank(), choros.size()]
    assert position == [2, 2]


def case_that_kills_one_rank():
    if choros.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    allreduce(1.0)


def case_that_is_wrong_on_one_rank():
    assert choros.rank() == 0
    allreduce(1.0)


def case_that_leaves_a_process_set():
    choros.add_process_set([0])


def case_that_is_skipped():
    pytest.skip("not today")
