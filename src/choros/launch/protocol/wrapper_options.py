"""The wrappers' command-line options, environment variables and signals."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from typing import Any

from choros.observe import MOVE

#: The variable with the job's unique name.
JOB = "CHOROS_JOB"
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
    """The wrappers' options before ``--``: switches and whole numbers. ``stdin``: mpirun's, else empty. ``events``:
    all, not only those chorosrun needs. ``gated``: this process has the key of mpirun's gate. ``elastic``: others go
    on, so the wrapper ends with its rank. ``new_rank``: its number, and for each number the first on the same host.
    """

    bind: bool = True
    stdin: bool = False
    result: bool = False
    events: bool = False
    ranks_per_host: tuple[int, ...] = ()
    restarts: int = 0
    gated: bool = False
    elastic: bool = False
    new_rank: tuple[int, ...] = ()

    def arguments(self) -> list[str]:
        """Returns the options as command-line arguments.

        >>> WrapperOptions(bind=False).arguments()
        ['--no-bind']
        """
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return [_argument(each, value) for each, value in values if value != each.default]

    @classmethod
    def parse(cls, argv: Sequence[str]) -> tuple[WrapperOptions, list[str]]:
        """Returns the options and the command in ``argv``, which ``--`` separates.

        >>> options, command = WrapperOptions.parse(["--stdin", "--", "python", "train.py"])
        >>> (options == WrapperOptions(stdin=True), command)
        (True, ['python', 'train.py'])
        """
        split = list(argv).index("--")
        defaults = {each.name: each.default for each in fields(cls)}
        given: dict[str, Any] = {}
        for argument in argv[:split]:
            name, has_numbers, text = argument.removeprefix("--").replace("-", "_").partition("=")
            if has_numbers:
                numbers = tuple(int(number) for number in text.split(","))
                given[name] = numbers if isinstance(defaults[name], tuple) else numbers[0]
            else:
                given[name.removeprefix("no_")] = not name.startswith("no_")
        return cls(**given), list(argv[split + 1 :])


def _argument(option: Field[Any], value: Any) -> str:
    """Returns ``--on``, ``--no-on`` or ``--name=1,2``."""
    name = option.name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}=" + ",".join(map(str, value if isinstance(value, tuple) else (value,)))
