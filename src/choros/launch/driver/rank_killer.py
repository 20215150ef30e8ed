"""SIGKILL for one rank. mpirun's signals reach all of them, so this takes the kernel, or ssh on another host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from choros.launch.plan.job import Ssh
from choros.launch.protocol.frames import Start
from choros.observe.stacks import STOPPED, parent_of, state_of

__all__ = ["RankKiller"]


@final
@dataclass(frozen=True)
class RankKiller:
    """Kills ranks, with the child processes of their groups.

    Attributes:
        hosts: the names of the job's other hosts.
        ssh: how to log in to them.
    """

    hosts: Sequence[str] = ()
    ssh: Ssh = field(default_factory=Ssh)

    def kill(self, rank: Start) -> bool:
        """Kills a rank, without waiting for its end, which does not come if its host cannot be reached.

        Returns:
            Whether its wrapper reports the end: one that is stopped cannot, and is killed.
        """
        with contextlib.suppress(OSError):
            if rank.host == os.uname().nodename:
                wrapper = parent_of(rank.pid)
                is_stopped = state_of(wrapper) == STOPPED
                os.killpg(rank.pid, signal.SIGKILL)
                if is_stopped:
                    os.kill(wrapper, signal.SIGKILL)
                return not is_stopped
            # A job may name its hosts in another way than they do themselves: then each one looks whether it is meant.
            command = f"case $(uname -n) in {rank.host}|{rank.host}.*) kill -s KILL -- -{rank.pid};; esac"
            for host in [rank.host] if rank.host in self.hosts else self.hosts:
                argv = [*self.ssh.argv(), host, command]
                quiet = subprocess.DEVNULL
                subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        return True
