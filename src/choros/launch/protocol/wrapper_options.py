"""The wrappers' options, environment variables and signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from choros.observe import MOVE

#: The variable with the job's unique name.
JOB = "CHOROS_JOB"
#: The variable with chorosrun's directory for temporary files, where the ranks are to have another.
OWN_TEMPORARY = "CHOROS_TMPDIR"
#: The variable with the addresses of a job with parameter servers, as in TF_CONFIG's "cluster".
CLUSTER = "CHOROS_CLUSTER"
#: The variable with the file descriptor to which a rank writes its function's result.
RESULT_FD = "CHOROS_RESULT_FD"

#: Signal that mpirun forwards to the wrappers → signal for the ranks.
SIGNAL_MEANINGS = {
    signal.SIGALRM: signal.SIGINT,
    signal.SIGABRT: signal.SIGTERM,
    signal.SIGURG: signal.SIGKILL,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGVTALRM: MOVE,
}
#: The signal on which every wrapper sends its rank's stacks; mpirun forwards it, and ranks do not receive it.
STACKS = signal.SIGPROF


@dataclass(frozen=True)
class WrapperOptions:
    """What chorosrun tells the wrappers, in their first argument. ``call``: the command is ``launch/bootstrap.py``, to
    which rank 0 passes a payload, and whose results are sent. ``events``: all, not only those chorosrun needs.
    ``gated``: this process has the key of mpirun's gate. ``elastic``: others go on, so the wrapper ends with its rank.
    ``new_rank``: see ``CHOROS_NEW_RANK``.
    """

    bind: bool = True
    call: bool = False
    events: bool = False
    ranks_per_host: Sequence[int] = ()
    restarts: int = 0
    gated: bool = False
    elastic: bool = False
    new_rank: str = ""

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(WrapperOptions, name)}
        return json.dumps(changed, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> WrapperOptions:
        """Returns the options that are written as ``text``.

        >>> options = WrapperOptions(bind=False, ranks_per_host=[2, 1])
        >>> str(options), WrapperOptions.parse(str(options)) == options
        ('{"bind":false,"ranks_per_host":[2,1]}', True)
        """
        return cls(**json.loads(text))
