"""Processes of others that try to be ranks of a job that was started without MPI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from comm.starts import by_hand, together
from harness import needs
from ranks.environment import QUICK, python_path

pytestmark = [pytest.mark.slow, needs("torch")]

RANK = """
import choros
from choros.parallel.objects import allgather_object
choros.init()
print("objects", allgather_object("mine"))
"""
INTRUDER = """
import os, choros, choros.parallel.objects as objects
class Harmful:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['HARM']}",)
try:
    choros.init()
    print("joined", objects.allgather_object(Harmful()))
except choros.EngineError as error:
    print("refused", error)
"""


def start(script: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **QUICK, "PYTHONPATH": python_path(), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_process_of_another_user_cannot_be_a_rank(tmp_path: Path) -> None:
    """It comes first, as rank 1, with a pickle that runs code. The job goes on with its own rank 1."""
    harm = tmp_path / "harm"
    ranks = [{**environ, "XDG_CACHE_HOME": str(tmp_path / "user")} for environ in by_hand(2)]
    intruder = {**ranks[1], "XDG_CACHE_HOME": str(tmp_path / "another user"), "HARM": str(harm)}
    with start(RANK, ranks[0]) as first:
        try:
            [(code, output)] = together([sys.executable, "-c", INTRUDER], [intruder])
            assert "refused rank 0 and this process could not authenticate each other" in output
            assert "joined" not in output
            [(code, output)] = together([sys.executable, "-c", RANK], [ranks[1]])
            output_of_first, _ = first.communicate(timeout=300)
        finally:
            first.kill()
    assert (code, first.returncode) == (0, 0), output + output_of_first
    for text in (output, output_of_first):
        assert "objects ['mine', 'mine']" in text
    assert "the process at 127.0.0.1 and this process could not authenticate each other" in output_of_first
    assert not harm.exists()


BOTH = """
import torch, torch.distributed as dist, choros
from choros.parallel.objects import allgather_object
for step in {steps}:
    step()
value = torch.ones(1)
dist.all_reduce(value)
print("sum", int(value), allgather_object(choros.rank()))
"""


@pytest.mark.parametrize("steps", ["(choros.init, dist.init_process_group)", "(dist.init_process_group, choros.init)"])
def test_the_script_can_use_torch_distributed_at_the_same_address(tmp_path: Path, steps: str) -> None:
    environs = [{**environ, "XDG_CACHE_HOME": str(tmp_path)} for environ in by_hand(2)]
    script = BOTH.format(steps=steps)
    for code, output in together([sys.executable, "-c", script], environs):
        assert "sum 2 [0, 1]" in output, output
        assert code == 0
