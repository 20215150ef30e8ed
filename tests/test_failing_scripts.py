"""Scripts that fail on some rank: each ends soon, with an exit code other than 0 and a helpful message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import CHOROSRUN

pytestmark = pytest.mark.slow

HEAD = """
import os, signal, time
import numpy as np
import choros
from choros.parallel.ops import allreduce, allgather, broadcast
"""

SCRIPTS = {
    "another order": (
        "choros.init()\n(allreduce if choros.rank() == 0 else allgather)(np.ones(3))",
        1,
        ("Ranks made different calls", "rank 0: allreduce(op=Average", "rank 1: allgather(", "script.py:7"),
    ),
    "another shape": (
        "choros.init()\nallreduce(np.ones(3 + choros.rank()))",
        1,
        (
            "rank 0: allreduce(op=Average, dtype=float64, shape=(3,))",
            "rank 1: allreduce(op=Average, dtype=float64, shape=(4,))",
        ),
    ),
    "one call too few": (
        "choros.init()\nfor _ in range(3 - choros.rank()): allreduce(1.0)",
        1,
        ("rank 0: allreduce(", "rank 1: shutdown()"),
    ),
    "a dtype that does not exist there": (
        "choros.init()\nallreduce(np.ones(3, complex if choros.rank() else float))",
        1,
        ("complex128 cannot be communicated",),
    ),
    "no init": ("print(choros.rank())", 1, ("call init() once",)),
    "no init before a collective": ("allreduce(1.0)", 1, ("call init() once",)),
    "an exception on one rank": (
        "choros.init()\nif choros.rank() == 1: raise RuntimeError('boom')\nallreduce(1.0)",
        1,
        ("rank 1 on", "RuntimeError: boom"),
    ),
    "an exit code of one rank's own": (
        "choros.init()\nif choros.rank() == 1: raise SystemExit(7)\nallreduce(1.0)",
        7,
        ("rank 1 on", "7"),
    ),
    "kill -9": (
        "choros.init()\nif choros.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\nallreduce(1.0)",
        137,
        ("rank 1 on", "SIGKILL"),
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_failing_script(name: str, tmp_path: Path) -> None:
    body, code, texts = SCRIPTS[name]
    script = tmp_path / "script.py"
    script.write_text(HEAD + body + "\n")
    done = subprocess.run(
        [CHOROSRUN, "-np", "2", sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    for text in texts:
        assert text in done.stderr


def test_last_line_is_the_error_of_the_rank_that_failed(tmp_path: Path) -> None:
    """Even if its message has several lines, and other ranks raise it too."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS["another shape"][0])
    done = subprocess.run(
        [CHOROSRUN, "-np", "2", sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("Ranks must call the same collectives")
    assert done.stderr.count("Traceback (most recent call last)") == 1
