"""What chorosrun and its worker wrappers agree on, besides the frames."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["CARRIED", "CLUSTER", "JOB", "RESULT_FD", "Options"]

#: The variable that holds the job's name, unlike any other's.
JOB = "CHOROS_JOB"
#: The variable that holds the addresses of a job with parameter servers, as in TF_CONFIG's "cluster".
CLUSTER = "CHOROS_CLUSTER"
#: The variable that holds the descriptor to which a rank writes its function's result.
RESULT_FD = "CHOROS_RESULT_FD"

_RANKS_PER_HOST = "--ranks-per-host="
_RESTARTS = "--restarts="

#: What the signals that mpirun passes on to the wrappers mean to the ranks.
CARRIED = {
    signal.SIGALRM: signal.SIGINT,
    signal.SIGABRT: signal.SIGTERM,
    signal.SIGURG: signal.SIGKILL,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
}


@dataclass(frozen=True)
class Options:
    """How chorosrun wants its wrappers to behave: the words before ``--`` on their command line.

    Attributes:
        bind: bind the rank to its share of the host's cores.
        stdin: the rank reads what mpirun sends it; otherwise it reads nothing.
        result: give the rank a pipe for the result of its function.
        events: give the rank a pipe for its events.
        ranks_per_host: how many ranks each host has, where hosts differ and chorosrun has assigned them.
        restarts: how often a worker, beside parameter servers, is started again when a signal has ended it.
    """

    bind: bool = True
    stdin: bool = False
    result: bool = False
    events: bool = False
    ranks_per_host: tuple[int, ...] = ()
    restarts: int = 0

    def words(self) -> list[str]:
        """The options as words of a command line.

        Example:
            >>> Options(bind=False).words()
            ['--no-bind']
        """
        chosen = {"--no-bind": not self.bind, "--stdin": self.stdin, "--result": self.result, "--events": self.events}
        words = [word for word, on in chosen.items() if on]
        if self.ranks_per_host:
            words.append(_RANKS_PER_HOST + ",".join(map(str, self.ranks_per_host)))
        if self.restarts:
            words.append(f"{_RESTARTS}{self.restarts}")
        return words

    @classmethod
    def parse(cls, words: Sequence[str]) -> tuple[Options, list[str]]:
        """The options and the command in ``words``, which ``--`` separates.

        Example:
            >>> options, command = Options.parse(["--stdin", "--", "python", "train.py"])
            >>> (options == Options(stdin=True), command)
            (True, ['python', 'train.py'])
        """
        split = list(words).index("--")
        chosen = set(words[:split])
        options = cls(
            "--no-bind" not in chosen,
            "--stdin" in chosen,
            "--result" in chosen,
            "--events" in chosen,
            tuple(_numbers(chosen, _RANKS_PER_HOST)),
            sum(_numbers(chosen, _RESTARTS)),
        )
        return options, list(words[split + 1 :])


def _numbers(words: Iterable[str], name: str) -> list[int]:
    """The numbers, between commas, that follow ``name``; none if the word is not there."""
    given = next((word.removeprefix(name) for word in words if word.startswith(name)), "")
    return [int(number) for number in given.split(",") if number]
