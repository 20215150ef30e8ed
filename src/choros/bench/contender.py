"""Contenders: the libraries and configurations that are compared, one row of a table each."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from choros.bench.start import Starter
from choros.errors import ConfigError

__all__ = ["CHOROS", "Contender", "check_names", "chosen"]

#: The name of choros' own contender: the baseline of all ratios.
CHOROS = "choros"


@dataclass(frozen=True)
class Contender:
    """A library, or a configuration of one, that is compared with the others.

    Attributes:
        name: its name in the tables and in the JSON file.
        start: returns the commands with which its users start it.
        module: the module below ``choros.bench.processes`` that its bench processes run.
        arguments: the module's command-line arguments.
        needs: modules that must be installed.
        environ: environment variables that its users set.
        single: whether it runs in a single process, whatever the number of ranks (which are devices then).
    """

    name: str
    start: Starter
    module: str
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    single: bool = False

    @property
    def missing(self) -> list[str]:
        """Those of ``needs`` that are not installed. compat/horovod is not Horovod."""
        return [module for module in self.needs if importlib.util.find_spec(module) is None or _is_choros(module)]

    @property
    def argv(self) -> list[str]:
        """The arguments with which Python runs the module."""
        return ["-m", f"choros.bench.processes.{self.module}", *self.arguments]


def _is_choros(module: str) -> bool:
    """Whether choros is behind the name of another library, as compat/horovod is."""
    try:
        return importlib.metadata.version(module).endswith("+choros")
    except importlib.metadata.PackageNotFoundError:
        return False


def check_names(only: Sequence[str], names: Sequence[str]) -> None:
    """Raises a ``ConfigError`` if a name in ``only`` is not among ``names``, the contenders'."""
    unknown = [name for name in only if name not in names]
    if unknown:
        known = ", ".join(map(repr, dict.fromkeys(names)))
        raise ConfigError(f"--only: unknown contender {unknown[0]!r}. Expected one of: {known}.")


def chosen(contenders: Sequence[Contender], only: Sequence[str]) -> tuple[Contender, ...]:
    """Returns choros and the contenders that ``only`` names; all contenders if ``only`` is empty."""
    return tuple(each for each in contenders if not only or each.name in (*only, CHOROS))
