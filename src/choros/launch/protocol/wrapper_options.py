"""The wrappers' command-line options, environment variables and signals."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["CLUSTER", "JOB", "RESULT_FD", "SIGNAL_MEANINGS", "WrapperOptions"]

#: The variable with the job's unique name.
JOB = "CHOROS_JOB"
#: The variable with the addresses of a job with parameter servers, as in TF_CONFIG's "cluster".
CLUSTER = "CHOROS_CLUSTER"
#: The variable with the file descriptor to which a rank writes its function's result.
RESULT_FD = "CHOROS_RESULT_FD"

_RANKS_PER_HOST = "--ranks-per-host="
_RESTARTS = "--restarts="

#: Signal that mpirun forwards to the wrappers → signal for the ranks.
SIGNAL_MEANINGS = {
    signal.SIGALRM: signal.SIGINT,
    signal.SIGABRT: signal.SIGTERM,
    signal.SIGURG: signal.SIGKILL,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}


@dataclass(frozen=True)
class WrapperOptions:
    """The wrappers' options: their arguments before ``--``.

    Attributes:
        bind: bind the rank to its share of the host's cores.
        stdin: the rank's standard input is mpirun's; otherwise it is empty.
        result: give the rank a pipe for the result of its function.
        events: the rank sends all of its events; otherwise those that chorosrun itself needs.
        ranks_per_host: the number of ranks of each host, if they differ and chorosrun has assigned them.
        restarts: how many times a worker of a job with parameter servers is restarted after a signal has ended it.
    """

    bind: bool = True
    stdin: bool = False
    result: bool = False
    events: bool = False
    ranks_per_host: tuple[int, ...] = ()
    restarts: int = 0

    def arguments(self) -> list[str]:
        """Returns the options as command-line arguments.

        Example:
            >>> WrapperOptions(bind=False).arguments()
            ['--no-bind']
        """
        chosen = {"--no-bind": not self.bind, "--stdin": self.stdin, "--result": self.result, "--events": self.events}
        arguments = [flag for flag, on in chosen.items() if on]
        if self.ranks_per_host:
            arguments.append(_RANKS_PER_HOST + ",".join(map(str, self.ranks_per_host)))
        if self.restarts:
            arguments.append(f"{_RESTARTS}{self.restarts}")
        return arguments

    @classmethod
    def parse(cls, argv: Sequence[str]) -> tuple[WrapperOptions, list[str]]:
        """Returns the options and the command in ``argv``, which ``--`` separates.

        Example:
            >>> options, command = WrapperOptions.parse(["--stdin", "--", "python", "train.py"])
            >>> (options == WrapperOptions(stdin=True), command)
            (True, ['python', 'train.py'])
        """
        split = list(argv).index("--")
        chosen = set(argv[:split])
        options = cls(
            "--no-bind" not in chosen,
            "--stdin" in chosen,
            "--result" in chosen,
            "--events" in chosen,
            tuple(_numbers(chosen, _RANKS_PER_HOST)),
            sum(_numbers(chosen, _RESTARTS)),
        )
        return options, list(argv[split + 1 :])


def _numbers(arguments: Iterable[str], name: str) -> list[int]:
    """Returns the comma-separated numbers of the option ``name``; an empty list if it is not given."""
    given = next((each.removeprefix(name) for each in arguments if each.startswith(name)), "")
    return [int(number) for number in given.split(",") if number]
