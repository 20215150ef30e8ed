"""Choice of the engine and its reason: the table, and the output of ``--verbose``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from choros.comm.selection import Choice, select, select_devices
from choros.config import ENGINE
from choros.errors import ChorosError, ConfigError, EngineUnavailable
from choros.topology import Topology
from harness import CHOROSRUN

MPIRUN, TORCHRUN = "Open MPI's mpirun", "torchrun"


def ranks(size: int, launcher: str) -> Topology:
    return Topology.from_hosts(["here"] * size, size - 1, launcher=launcher)


ALONE = Topology()
#: ``CHOROS_ENGINE``, the launcher and number of ranks, the argument of ``init``, and the choice.
CHOICES = {
    "alone": ("", ALONE, None, Choice("local", "one rank: nothing to move")),
    "alone, named": ("auto", ALONE, [0], Choice("local", "one rank: nothing to move")),
    "mpirun of one": ("", ranks(1, MPIRUN), None, Choice("local", "one rank: nothing to move")),
    "torchrun of one": ("", ranks(1, TORCHRUN), None, Choice("local", "one rank: nothing to move")),
    "mpirun": ("", ranks(4, MPIRUN), None, Choice("mpi", "Open MPI's mpirun started 4 ranks")),
    "srun": ("", ranks(2, "srun"), None, Choice("torch", "srun started 2 ranks without MPI")),
    "srun, mpi requested": ("mpi", ranks(2, "srun"), None, Choice("mpi", "CHOROS_ENGINE=mpi")),
    "srun, communicator": ("", ranks(2, "srun"), object(), Choice("mpi", "init() was given an MPI communicator")),
    "srun --mpi=pmix": ("", ranks(2, "srun --mpi=pmix"), None, Choice("mpi", "srun --mpi=pmix started 2 ranks")),
    "torchrun": ("", ranks(2, TORCHRUN), None, Choice("torch", "torchrun started 2 ranks without MPI")),
    "TF_CONFIG": ("", ranks(3, "TF_CONFIG"), [0, 2], Choice("torch", "TF_CONFIG started 3 ranks without MPI")),
    "some ranks of mpirun": ("", ranks(4, MPIRUN), [0, 1], Choice("mpi", "Open MPI's mpirun started 4 ranks")),
    "communicator": ("", ALONE, object(), Choice("mpi", "init() was given an MPI communicator")),
    "local requested": ("local", ALONE, None, Choice("local", "CHOROS_ENGINE=local")),
    "mpi requested": ("mpi", ALONE, None, Choice("mpi", "CHOROS_ENGINE=mpi")),
    "torch requested under mpirun": ("torch", ranks(2, MPIRUN), None, Choice("torch", "CHOROS_ENGINE=torch")),
    "xla requested": ("xla", ranks(2, MPIRUN), None, Choice("xla", "CHOROS_ENGINE=xla")),
}


@pytest.mark.parametrize(("requested", "topology", "comm", "choice"), CHOICES.values(), ids=CHOICES)
def test_choice(requested: str, topology: Topology, comm: object, choice: Choice) -> None:
    assert select({ENGINE.name: requested}, topology, comm, installed=lambda _: True) == choice


#: As above, the module that is not installed, and a part of the error.
ERRORS = {
    "unknown": ("nccl", ALONE, None, "", ConfigError, "'nccl' is not one of auto, local, mpi, torch, xla"),
    "local for many": ("local", ranks(2, MPIRUN), None, "", ConfigError, "is for one rank, but Open MPI's mpirun"),
    "mpi under torchrun": ("mpi", ranks(2, TORCHRUN), None, "", EngineUnavailable, "with chorosrun -np 2 in place"),
    "communicator under torchrun": ("", ranks(2, TORCHRUN), object(), "", EngineUnavailable, "mpi engine cannot join"),
    "communicator for torch": ("torch", ranks(2, MPIRUN), object(), "", ConfigError, "only the mpi engine takes"),
    "no torch": ("", ranks(2, "TF_CONFIG"), None, "torch", EngineUnavailable, "pip install torch"),
    "no torch under srun": ("", ranks(2, "srun"), None, "torch", EngineUnavailable, "with srun --mpi=pmix"),
    "no torch, requested": ("torch", ranks(2, MPIRUN), None, "torch", EngineUnavailable, "chorosrun -np 2"),
    "no jax": ("xla", ranks(2, MPIRUN), None, "jax", EngineUnavailable, "pip install jax"),
}


@pytest.mark.parametrize(("requested", "topology", "comm", "missing", "error", "text"), ERRORS.values(), ids=ERRORS)
def test_invalid_choice(
    requested: str, topology: Topology, comm: object, missing: str, error: type[ChorosError], text: str
) -> None:
    with pytest.raises(error, match=text):
        select({ENGINE.name: requested}, topology, comm, installed=lambda module: module != missing)


#: The engine, the number of ranks, the module that is not installed; the chosen module, its devices, and the reason.
DEVICES = {
    "alone": ("mpi", 1, "", None, (), "one rank"),
    "mpi": ("mpi", 2, "", "torch_devices", ("cuda",), "NCCL moves those on GPUs; MPI"),
    "torch": ("torch", 3, "", "torch_devices", ("cpu", "cuda"), "Gloo those in host memory"),
    "no torch": ("mpi", 2, "torch", None, (), "as PyTorch is not installed"),
    "threads": ("threads", 2, "", None, (), "which threads share"),
}


@pytest.mark.parametrize(("engine", "size", "missing", "module", "kinds", "reason"), DEVICES.values(), ids=DEVICES)
def test_choice_of_device_collectives(
    engine: str, size: int, missing: str, module: str | None, kinds: tuple[str, ...], reason: str
) -> None:
    choice = select_devices(engine, size, installed=lambda name: name != missing)
    assert (choice.module, choice.kinds) == (module, kinds)
    assert reason in choice.reason


def test_verbose_shows_the_engine_once() -> None:
    command = [CHOROSRUN, "-np", "2", "--verbose", sys.executable, "-c", "import choros; choros.init()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr.count("choros: engine mpi: Open MPI's mpirun started 2 ranks") == 1
