"""Agents: ranks on hosts of a cluster that starts the same command on each of them, and needs no ssh there.

::

    host 0: chorosrun python train.py                 hosts 1, 2, …: the same command
      Hub ◄─────────────────── AgentReady: slots ────── agent: connects to host 0, again until that is there
       ▲  -H host0:4,host1:4 --ssh-command shell
       │ ┌────────────────────────────────────┐
       │ │ launcher ── mpirun ── shell host1 prted …    in place of ssh
       │ └──────────────────────│─────────────┘
       ├◄── ShellCommand ───────┘
       ├─────────────────────── RunCommand ───────────► agent ── sh -c "prted …" ── wrapper ── rank
       │◄────────── CommandOutput, CommandExit ───────────┘
       └─ the job is over ───── its exit code ────────► agent: ends with this code

Host 0 alone listens, at one port, for processes that prove that they have ``CHOROS_SECRET``. A host whose agent goes is
lost, as one that ssh does not reach; one that comes again is one more host, for elastic jobs.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

#: The name with which the hub proves that it has the key.
HUB = "chorosrun"
#: The exit code of a command whose host is lost, as ssh's.
LOST = 255
#: From an agent: its host is about to go.
HOST_LEAVES = "host leaves"


def say(text: str) -> None:
    """Says something of this host on standard error."""
    sys.stderr.write(f"chorosrun: {text}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class AgentReady:
    """An agent's first message: host number ``index``, with ``slots``, is there; ``name``: its own."""

    index: int
    slots: int
    name: str


@dataclass(frozen=True)
class HostSlots:
    """From who knows better than the hosts: how many slots they have now, by their numbers. Answered with ``None``."""

    slots: Mapping[int, int]


@dataclass(frozen=True)
class ShellCommand:
    """A shell's first message: what is to be run on ``host``."""

    host: str
    text: str


@dataclass(frozen=True)
class RunCommand:
    """To an agent: run a command, whose output and end have this number; ``None``: stop it, as its shell has gone. An
    agent gets these, and at last the job's exit code.
    """

    number: int
    text: str | None


@dataclass(frozen=True)
class CommandOutput:
    """What a command has written to ``descriptor`` 1 or 2; sent on to its shell."""

    number: int
    descriptor: int
    data: bytes


@dataclass(frozen=True)
class CommandExit:
    """A command has ended; sent on to its shell."""

    number: int
    code: int
