"""Who takes part: one row of a table each."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from choros.bench.start import Starter
from choros.errors import ConfigError

__all__ = ["CHOROS", "Contender", "check_names", "chosen"]

#: The name of our own contender, by which the others' figures are divided.
CHOROS = "choros"


@dataclass(frozen=True)
class Contender:
    """One of those that are compared.

    Attributes:
        name: what the tables and the JSON call it.
        start: how its users start it.
        worker: the module below ``choros.bench.workers`` that its processes run.
        arguments: the worker's.
        needs: modules that must be installed.
        environ: what a user of it sets.
        single: it is one process, however many ranks (that is, devices) it has.
    """

    name: str
    start: Starter
    worker: str
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    single: bool = False

    @property
    def missing(self) -> list[str]:
        """The modules it needs that are not installed."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None]

    @property
    def words(self) -> list[str]:
        """What Python is given to run the worker."""
        return ["-m", f"choros.bench.workers.{self.worker}", *self.arguments]


def check_names(only: Sequence[str], names: Sequence[str]) -> None:
    """Raises a ``ConfigError`` if ``only`` has a name that is none of a contender."""
    unknown = [name for name in only if name not in names]
    if unknown:
        known = ", ".join(map(repr, dict.fromkeys(names)))
        raise ConfigError(f"--only: there is no contender {unknown[0]!r} here. There are: {known}.")


def chosen(contenders: Sequence[Contender], only: Sequence[str]) -> tuple[Contender, ...]:
    """choros, and of the others those that ``only`` names; all if it names none."""
    return tuple(each for each in contenders if not only or each.name in (*only, CHOROS))
