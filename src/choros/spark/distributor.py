"""``Distributor``: the shape of pyspark's ``TorchDistributor``, on ``choros.spark.run``."""

import os
import runpy
import sys
from collections.abc import Callable
from typing import Any, final

from choros.errors import ConfigError
from choros.launch.run import run as run_here
from choros.spark.own_machine import VISIBLE
from choros.spark.run import run


@final
class Distributor:
    """Runs a function or a file on ``num_processes`` ranks, as pyspark's ``TorchDistributor`` does, on any framework.

    Args:
        num_processes: Number of ranks.
        local_mode: Whether they run on the driver's machine, as processes of its own; else in Spark's executors.
        use_gpu: Whether the ranks may use GPUs; else they see none.
        arguments: Further arguments of ``choros.spark.run``, or with ``local_mode`` of ``choros.run``.

    Example:
        >>> import choros.spark
        >>> distributor = choros.spark.Distributor(num_processes=4, local_mode=False, use_gpu=False)
        >>> distributor.run("train.py", "--epochs", "3")  # doctest: +SKIP
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True, **arguments: Any) -> None:
        if num_processes < 1:
            raise ConfigError(f"num_processes={num_processes}: expected 1 or more.")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self._arguments = arguments

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``train_object(*args, **kwargs)`` on each rank, and returns what rank 0 returns; or the Python file of
        this name, which each machine must have, with ``args`` as its arguments, and returns ``None``.
        """
        function: Callable[..., Any] = run_file if isinstance(train_object, str) else train_object
        given = (train_object, *map(str, args)) if isinstance(train_object, str) else args
        own = dict(self._arguments)
        if not self.use_gpu:
            own["env"] = {**own.get("env", {}), VISIBLE: ""}
        start = run_here if self.local_mode else run
        results: list[Any] = start(function, given, kwargs, num_proc=self.num_processes, **own)
        return results[0]


def run_file(file: str, *args: str) -> None:
    """Runs a Python file as the main program with these arguments; an exit with 0 is its end."""
    sys.argv[:] = [file, *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
