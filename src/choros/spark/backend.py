"""``SparkBackend``: how an estimator runs its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from choros.spark.driver import active_context
from choros.spark.run import run


@dataclass(frozen=True)
class SparkBackend:
    """Runs ranks with ``choros.spark.run``, whose arguments these are, named as in Horovod."""

    num_proc: int | None = None
    env: Mapping[str, str] | None = None
    start_timeout: float | None = None
    use_mpi: bool | None = None
    use_gloo: bool | None = None
    extra_mpi_args: str | None = None
    stdout: TextIO | None = None
    stderr: TextIO | None = None
    verbose: int = 1
    nics: str | Sequence[str] | None = None
    prefix_output_with_timestamp: bool = False

    def num_processes(self) -> int:
        """Returns the number of ranks."""
        return active_context().defaultParallelism if self.num_proc is None else self.num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **own: Any,
    ) -> list[Any]:
        """Returns what ``fn`` returns on the ranks; ``own``: further arguments of ``choros.spark.run``."""
        given = {**vars(self), "env": {**(self.env or {}), **(env or {})}, "num_proc": self.num_processes()}
        return run(fn, args, kwargs, **given, **own)
