"""Faults that are injected: how they are written, and what they do to a process."""

import re
import signal
import subprocess
import sys
import time

import pytest

from choros.errors import ConfigError
from choros.observe.chaos import Fault, parse_faults


def test_faults_are_in_the_order_of_their_steps():
    assert parse_faults("stop:rank=2@step=30+0.5s, kill:rank=1@step=17", 3) == (Fault(17, 1), Fault(30, 2, 0.5))


def test_random_kills_are_drawn_from_the_seed():
    drawn = parse_faults("random-kills=3@step=5-9,seed=7", 4)
    assert drawn == parse_faults("seed=7,random-kills=3@step=5-9", 4)
    assert len({fault.rank for fault in drawn}) == 3
    assert all(5 <= fault.step <= 9 and not fault.seconds for fault in drawn)
    assert any(drawn != parse_faults(f"random-kills=3@step=5-9,seed={seed}", 4) for seed in range(3))


def test_random_kills_are_in_the_first_hundred_steps_if_none_are_given():
    given = "kill:rank=1@step=17,stop:rank=2@step=30+5s,seed=7,random-kills=3"
    assert parse_faults(given, 4) == parse_faults(f"{given}@step=1-100", 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no fault. Write faults with commas between them: kill:rank=1@step=17"),
        ("kill:rank=1", "'kill:rank=1' is no fault."),
        ("kill:rank=1@step=2+5s", "a stop, and no kill, has a time."),
        ("stop:rank=1@step=2", "a stop, and no kill, has a time."),
        ("stop:rank=1@step=2+0s", "a stop, and no kill, has a time."),
        ("kill:rank=4@step=2", "rank 4, step 2: the job has ranks 0 to 3."),
        ("kill:rank=1@step=0", "rank 1, step 0:"),
        ("random-kills=3@step=9", "'random-kills=3@step=9' is no fault."),
        ("random-kills=5@step=1-2", "asks for 5 of 4 ranks at 1-2."),
        ("random-kills=1@step=3-2", "asks for 1 of 4 ranks at 3-2."),
    ],
)
def test_errors_teach_the_grammar(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        parse_faults(text, 4)
    assert "The first step is 1." in str(raised.value)


STEPS = """
import os, sys, time
from choros.settings import Config
from choros.observe import events
from choros.observe.events import Kind
from choros.observe.listeners import start_listeners
os.environ["CHOROS_CHAOS"] = sys.argv[1]
stop = start_listeners(Config.from_environ(os.environ))
for step in range(3):
    began = time.monotonic()
    events.emit(Kind.STEP_BEGUN)
    print(step + 1, time.monotonic() - began > 0.3, flush=True)
stop()
"""


INVALID = """
import os, choros
from choros.observe import EVENTS_FD, events
from choros.settings import current
os.environ[EVENTS_FD] = str(os.pipe()[1])  # to a wrapper
try:
    choros.init()
except choros.ConfigError:
    del os.environ["CHOROS_CHAOS"]
    print(len(events.heard), current().chaos)
"""


def test_an_init_that_fails_by_its_faults_leaves_no_listeners(monkeypatch):
    monkeypatch.setenv("CHOROS_CHAOS", "kil:rank=0@step=1")
    run = subprocess.run([sys.executable, "-c", INVALID], capture_output=True, text=True, timeout=60, check=False)
    assert (run.stdout, run.stderr, run.returncode) == ("0 \n", "", 0)


def steps(faults):
    return subprocess.run(
        [sys.executable, "-c", STEPS, faults], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_rank_is_killed_at_its_step():
    ended = steps("kill:rank=0@step=3")
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "1 False\n2 False\n")


def test_a_rank_is_stopped_for_a_time():
    began = time.monotonic()
    ended = steps("stop:rank=0@step=2+0.5s")
    assert (ended.returncode, ended.stdout) == (0, "1 False\n2 True\n3 False\n"), ended.stderr
    assert time.monotonic() - began > 0.5


def test_a_fault_whose_step_never_comes_is_reported():
    ended = steps("kill:rank=0@step=4")
    assert (ended.returncode, ended.stderr) == (
        0, "--chaos: rank 0 ends after 3 steps; it was to be killed in step 4.\n")  # fmt: skip
