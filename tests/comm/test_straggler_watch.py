"""Ranks that MPI did not start: rank 0 names those for which the others wait in each step."""

import sys
from collections.abc import Callable

import pytest

from comm.starts import Environ, by_hand, of_tf_config, together
from harness import needs

pytestmark = needs("torch")

#: Steps of a second, of a clock of their own, in which rank 1 never waits, and the others always do.
STEPS = """
import itertools, time, types
import choros
from choros.observe import progress
from choros.observe.progress import page
choros.init()
progress.time = types.SimpleNamespace(time=time.time, perf_counter=itertools.count(1.0).__next__)
rank = choros.rank()
for _ in range(25):
    page.waited += 0.0 if rank == 1 else 0.5
    page.note_step()
choros.shutdown()
choros.init()  # ranks may leave and join; it is said once
"""


#: Rank 0 has the others' last steps however slow this machine is.
PATIENT = "from choros import durations\ndurations.ANSWER = durations.STRAGGLERS_END = 60.0\n"


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_hand, of_tf_config])
def test_a_slow_rank_is_named_at_the_end(start: Callable[[int], list[Environ]]) -> None:
    script = PATIENT + STEPS + "if rank == 1: time.sleep(1)  # rank 2 has ended before\n"
    (code, output), *others = together([sys.executable, "-c", script], start(3))
    assert [code, *(code for code, _ in others)] == [0, 0, 0], (output, others)
    expected = (
        "slowed down by rank 1: it computes 50 % of each step longer than others do, which wait. If it computed as "
        "fast, steps would be 2.0 times as fast."
    )
    assert output.count(expected) == 1, output
    assert not any("slowed down" in output for _, output in others)


@pytest.mark.slow
def test_ranks_that_leave_without_a_word_do_not_keep_the_first_one() -> None:
    script = STEPS + "import os\nos._exit(0) if rank else None"
    outcomes = together([sys.executable, "-c", script], by_hand(2), timeout=60)
    assert "slowed down" not in outcomes[0][1]
