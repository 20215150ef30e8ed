"""What chorosrun and its worker wrappers agree on, besides the frames."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CARRIED", "JOB", "RESULT_FD", "Options"]

#: The variable that holds the job's name, unlike any other's.
JOB = "CHOROS_JOB"
#: The variable that holds the descriptor to which a rank writes its function's result.
RESULT_FD = "CHOROS_RESULT_FD"

_RANKS_PER_HOST = "--ranks-per-host="

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
        ranks_per_host: how many ranks each host has, where hosts differ and chorosrun has dealt them out.
    """

    bind: bool = True
    stdin: bool = False
    result: bool = False
    ranks_per_host: tuple[int, ...] = ()

    def words(self) -> list[str]:
        """The options as words of a command line.

        Example:
            >>> Options(bind=False).words()
            ['--no-bind']
        """
        chosen = {"--no-bind": not self.bind, "--stdin": self.stdin, "--result": self.result}
        words = [word for word, on in chosen.items() if on]
        if self.ranks_per_host:
            words.append(_RANKS_PER_HOST + ",".join(map(str, self.ranks_per_host)))
        return words

    @classmethod
    def parse(cls, words: Sequence[str]) -> tuple[Options, list[str]]:
        """The options and the command in ``words``, which ``--`` separates.

        Example:
            >>> Options.parse(["--stdin", "--", "python", "train.py"])
            (Options(bind=True, stdin=True, result=False, ranks_per_host=()), ['python', 'train.py'])
        """
        split = list(words).index("--")
        chosen = set(words[:split])
        counts = next((word for word in chosen if word.startswith(_RANKS_PER_HOST)), _RANKS_PER_HOST)
        options = cls(
            "--no-bind" not in chosen,
            "--stdin" in chosen,
            "--result" in chosen,
            tuple(int(count) for count in counts.removeprefix(_RANKS_PER_HOST).split(",") if count),
        )
        return options, list(words[split + 1 :])
