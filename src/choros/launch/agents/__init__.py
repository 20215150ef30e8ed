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
