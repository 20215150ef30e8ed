"""What a job of ranks is: how many, with what, and who starts them."""

from __future__ import annotations

import json
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

Environ = Mapping[str, str]

#: The environment variable that names the modules which a process of the tests must not find.
HIDDEN = "CHOROS_TEST_HIDDEN"
CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))


@dataclass(frozen=True)
class Start:
    """A process to start: its command, and what is in its environment beside ours."""

    command: tuple[str, ...]
    environ: Environ = field(default_factory=dict)


class Launcher(ABC):
    """Who starts the ranks."""

    @abstractmethod
    def starts(self, ranks: int, program: Sequence[str]) -> list[Start]:
        """What to start so that ``program``, the arguments of a Python, runs on so many ranks."""


@final
@dataclass(frozen=True)
class ChorosRun(Launcher):
    """Ours."""

    def starts(self, ranks: int, program: Sequence[str]) -> list[Start]:
        return [Start((CHOROSRUN, "-np", str(ranks), sys.executable, *program))]

    def __str__(self) -> str:
        return ""


@final
@dataclass(frozen=True)
class TorchRun(Launcher):
    """PyTorch's launcher."""

    def starts(self, ranks: int, program: Sequence[str]) -> list[Start]:
        words = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        return [Start((sys.executable, *words, *program))]

    def __str__(self) -> str:
        return "torchrun"


@final
@dataclass(frozen=True)
class TFConfig(Launcher):
    """Nobody: each process has a ``TF_CONFIG`` of its own."""

    def starts(self, ranks: int, program: Sequence[str]) -> list[Start]:
        workers = [f"localhost:{free_port()}" for _ in range(ranks)]
        configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(ranks)]
        return [Start((sys.executable, *program), {"TF_CONFIG": json.dumps(config)}) for config in configs]

    def __str__(self) -> str:
        return "TF_CONFIG"


@final
@dataclass(frozen=True)
class Job:
    """What the ranks of a job have in common; jobs that are equal can be one.

    Attributes:
        ranks: how many.
        framework: Keras' backend, if they need one.
        environ: what else is in their environment.
        launcher: who starts them.
        hidden: modules that they must not find.
        name: tells it from others of so many ranks with this framework.
    """

    ranks: int
    framework: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    launcher: Launcher = ChorosRun()
    hidden: tuple[str, ...] = ()
    name: str = ""

    def environment(self) -> Environ:
        """What the ranks have in their environment beside ours."""
        framework = {"KERAS_BACKEND": self.framework} if self.framework else {}
        return {**framework, HIDDEN: " ".join([*self.hidden, *unwanted(self.framework)]), **dict(self.environ)}

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.framework, self.launcher, self.name, self.ranks) if str(part))


def unwanted(framework: str) -> tuple[str, ...]:
    """Modules that Keras would look for as soon as it sees data, which takes seconds.

    With JAX, some cases have data sets of TensorFlow.
    """
    return ("tensorflow",) if framework == "torch" else ()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
