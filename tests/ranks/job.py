"""The jobs of tests: the number of ranks, their environment and their launcher."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom
from typing import final

from packaging.version import Version

Environ = Mapping[str, str]


def _fast_to_compile() -> str:
    """XLA's flag with which JAX compiles in two thirds of the time, if it has it: an unknown one ends the process."""
    known = find_spec("jax") is not None and Version(version("jax")) < Version("0.11.1")
    return "--xla_cpu_use_fusion_emitters=false" if known else ""


#: The environment variable with the names of the modules that a process of the tests must not find.
HIDDEN = "CHOROS_TEST_HIDDEN"
#: TensorFlow may not know it, so it is set where JAX alone is used.
FAST_TO_COMPILE = _fast_to_compile()
CHOROSRUN = str(Path(sys.executable).with_name("chorosrun"))


class Launcher(ABC):
    """A way to start the ranks."""

    @abstractmethod
    def command(self, ranks: int, program: Sequence[str]) -> tuple[str, ...]:
        """The command that runs ``program`` on this many ranks."""


@final
@dataclass(frozen=True)
class ChorosRun(Launcher):
    """Our launcher."""

    def command(self, ranks: int, program: Sequence[str]) -> tuple[str, ...]:
        return (CHOROSRUN, "-np", str(ranks), *program)

    def __str__(self) -> str:
        return ""


@final
@dataclass(frozen=True)
class TorchRun(Launcher):
    """PyTorch's launcher."""

    def command(self, ranks: int, program: Sequence[str]) -> tuple[str, ...]:
        argv = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--no-python")
        return (sys.executable, *argv, *program)

    def __str__(self) -> str:
        return "torchrun"


@final
@dataclass(frozen=True)
class Job:
    """The settings that all ranks of a job share; tests with equal jobs share the processes.

    Attributes:
        ranks: the number of ranks.
        framework: Keras' backend, if they need one.
        environ: further environment variables.
        launcher: starts the ranks.
        hidden: modules that they must not find.
        anew: its ranks are new processes, not copies of one that has the framework.
        name: distinguishes it from other jobs with as many ranks and this framework.
    """

    ranks: int
    framework: str = ""
    environ: tuple[tuple[str, str], ...] = ()
    launcher: Launcher = ChorosRun()
    hidden: tuple[str, ...] = ()
    anew: bool = False
    name: str = ""

    def environment(self) -> Environ:
        """The variables added to the ranks' environment."""
        framework = {"KERAS_BACKEND": self.framework} if self.framework else {}
        if self.framework == "jax":
            framework["XLA_FLAGS"] = FAST_TO_COMPILE
        return {**framework, HIDDEN: " ".join([*self.hidden, *unwanted(self.framework)]), **dict(self.environ)}

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.framework, self.launcher, self.name, self.ranks) if str(part))


def unwanted(framework: str) -> tuple[str, ...]:
    """Modules that Keras would import at once, or as soon as it is given data, which takes seconds.

    With JAX, some cases have data sets of TensorFlow.
    """
    return {"torch": ("tensorflow", "jax"), "tensorflow": ("jax",)}.get(framework, ())


def free_port() -> int:
    """A port that is free, and another one each time. It is below those that the kernel gives to connections, of which
    it could give this one to another process before it is used.
    """
    while True:
        port = _random.randrange(10_000, 32_768)
        with suppress(OSError), socket.socket() as probe:
            if port not in _given:
                probe.bind(("127.0.0.1", port))
                _given.add(port)
                return port


#: Not Python's generator, which cases seed.
_random = SystemRandom()
_given: set[int] = set()
