"""An elastic job: how many ranks it may have, and what chorosrun does when some are lost. Frozen, and validated.

::

    --min-np 2      -np 3       --max-np 4
        │             │             │
        ▼             ▼             ▼
    fewer: it ends    it starts     it grows to, on hosts with free slots
"""

from __future__ import annotations

from dataclasses import dataclass

from choros import config
from choros.errors import ConfigError

__all__ = ["Elastic"]


@dataclass(frozen=True)
class Elastic:
    """The bounds of an elastic job.

    Attributes:
        least: with fewer ranks, the job ends.
        most: the job has no more ranks.
        timeout: how many seconds it waits for hosts with slots for ``least`` ranks.
        resets: how many times it may be started again; ``None``: without a limit.

    Example:
        >>> Elastic(least=2, most=4).variables()["CHOROS_MIN_NP"]
        '2'
        >>> Elastic.around(4, least=None, most=2)
        Traceback (most recent call last):
        choros.errors.ConfigError: --max-np 2: the job starts with more ranks, -np 4. Give --min-np <= -np <= --max-np.
    """

    least: int
    most: int
    timeout: float = 600.0
    resets: int | None = None

    @classmethod
    def around(
        cls, size: int, *, least: int | None, most: int | None, timeout: float = 600.0, resets: int | None = None
    ) -> Elastic:
        """Returns the bounds of a job that starts with ``size`` ranks, which are the defaults of both numbers.

        Raises:
            ConfigError: the number is not between the bounds.
        """
        for flag, bound, wrong in (("--min-np", least, "fewer"), ("--max-np", most, "more")):
            if bound is not None and (size < bound if wrong == "fewer" else size > bound):
                raise ConfigError(
                    f"{flag} {bound}: the job starts with {wrong} ranks, -np {size}. Give --min-np <= -np <= --max-np."
                )
        return cls(size if least is None else least, size if most is None else most, timeout, resets)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that tell the ranks."""
        wanted = {
            config.ELASTIC.name: "1",
            "HOROVOD_ELASTIC": "1",
            config.MIN_NP.name: str(self.least),
            config.MAX_NP.name: str(self.most),
            config.ELASTIC_TIMEOUT.name: f"{self.timeout:g}",
        }
        return wanted if self.resets is None else {**wanted, config.RESET_LIMIT.name: str(self.resets)}
