"""Choice of the engine and its reason: the table, and the output of ``--verbose``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from choros.comm.devices import select_devices
from choros.comm.engines import select
from choros.errors import ChorosError, ConfigError, EngineUnavailable
from choros.settings import ENGINES, Config
from choros.topology import Topology
from harness import CHOROSRUN

MPIRUN, TORCHRUN = "Open MPI's mpirun", "torchrun"


def ranks(size: int, launcher: str) -> Topology:
    return Topology.from_hosts(["here"] * size, size - 1, launcher=launcher)


ALONE = Topology()
INTRACOMM = SimpleNamespace(Create_intercomm=None)
#: ``CHOROS_ENGINE``, the launcher and number of ranks, the argument of ``init``, and the choice.
CHOICES = {
    "alone": ("", ALONE, None, ("local", "one rank: nothing to move")),
    "alone, named": ("auto", ALONE, [0], ("local", "one rank: nothing to move")),
    "mpirun of one": ("", ranks(1, MPIRUN), None, ("local", "one rank: nothing to move")),
    "torchrun of one": ("", ranks(1, TORCHRUN), None, ("local", "one rank: nothing to move")),
    "mpirun": ("", ranks(4, MPIRUN), None, ("mpi", "Open MPI's mpirun started 4 ranks")),
    "srun": ("", ranks(2, "srun"), None, ("torch", "srun started 2 ranks without MPI")),
    "srun, mpi requested": ("mpi", ranks(2, "srun"), None, ("mpi", "CHOROS_ENGINE=mpi")),
    "srun, communicator": ("", ranks(2, "srun"), INTRACOMM, ("mpi", "init() was given an MPI communicator")),
    "srun --mpi=pmix": ("", ranks(2, "srun --mpi=pmix"), None, ("mpi", "srun --mpi=pmix started 2 ranks")),
    "torchrun": ("", ranks(2, TORCHRUN), None, ("torch", "torchrun started 2 ranks without MPI")),
    "TF_CONFIG": ("", ranks(3, "TF_CONFIG"), [0, 2], ("torch", "TF_CONFIG started 3 ranks without MPI")),
    "some ranks of mpirun": ("", ranks(4, MPIRUN), [0, 1], ("mpi", "Open MPI's mpirun started 4 ranks")),
    "communicator": ("", ALONE, INTRACOMM, ("mpi", "init() was given an MPI communicator")),
    "local requested": ("local", ALONE, None, ("local", "CHOROS_ENGINE=local")),
    "mpi requested": ("mpi", ALONE, None, ("mpi", "CHOROS_ENGINE=mpi")),
    "torch requested under mpirun": ("torch", ranks(2, MPIRUN), None, ("torch", "CHOROS_ENGINE=torch")),
    "xla requested": ("xla", ranks(2, MPIRUN), None, ("xla", "CHOROS_ENGINE=xla")),
}


@pytest.mark.parametrize(("requested", "topology", "comm", "choice"), CHOICES.values(), ids=CHOICES)
def test_choice(requested: str, topology: Topology, comm: object, choice: tuple[str, str]) -> None:
    assert select(Config.from_environ({"CHOROS_ENGINE": requested}), topology, comm, installed=lambda _: True) == choice


#: As above, the module that is not installed, and a part of the error.
ERRORS = {
    "unknown": ("nccl", ALONE, None, "", ConfigError, f"'nccl' is not one of auto, {', '.join(ENGINES)}"),
    "local for many": ("local", ranks(2, MPIRUN), None, "", ConfigError, "is for one rank, but Open MPI's mpirun"),
    "mpi under torchrun": ("mpi", ranks(2, TORCHRUN), None, "", EngineUnavailable, "with chorosrun -np 2 in place"),
    "communicator under torchrun": ("", ranks(2, TORCHRUN), INTRACOMM, "", EngineUnavailable, "mpi engine cannot join"),
    "communicator for torch": ("torch", ranks(2, MPIRUN), INTRACOMM, "", ConfigError, "only the mpi engine takes"),
    "no ranks": ("", ranks(2, MPIRUN), 3, "", ConfigError, r"init\(comm=3\): expected a list of ranks"),
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
        select(
            Config.from_environ({"CHOROS_ENGINE": requested}),
            topology,
            comm,
            installed=lambda module: module != missing,
        )


NO_DRIVER = "this machine has no driver of NVIDIA's"
#: CHOROS_DEVICES, the engine, the number of ranks, why nccl4py cannot be used, whether PyTorch is installed; the chosen
#: module, its devices, and the reason.
DEVICES = {
    "alone": ("", "mpi", 1, "", True, None, (), "one rank"),
    "nccl4py": ("", "mpi", 2, "", True, "nccl4py_devices", ("cuda",), "by nccl4py, of TensorFlow and of PyTorch"),
    "nccl4py alone": ("", "mpi", 2, "", False, "nccl4py_devices", ("cuda",), "NCCL moves those on GPUs"),
    "no GPU of NVIDIA": ("", "mpi", 2, NO_DRIVER, True, "torch_devices", ("cuda",), f"RCCL), because {NO_DRIVER}"),
    "neither": ("", "mpi", 2, "x is missing", False, None, (), "because x is missing, and PyTorch is not installed"),
    "torchrun": ("", "torch", 3, "", True, "torch_devices", ("cpu", "cuda"), "which connects these ranks"),
    "torchrun, requested": ("nccl4py", "torch", 3, "", True, "nccl4py_devices", ("cuda",), "by nccl4py"),
    "torch requested": ("torch", "mpi", 2, "", True, "torch_devices", ("cuda",), "CHOROS_DEVICES=torch"),
    "host requested": ("host", "torch", 2, "", True, None, (), "CHOROS_DEVICES=host"),
    "threads": ("", "threads", 2, "", True, None, (), "which threads share"),
    "xla": ("", "xla", 2, "", True, None, (), "this engine has no collectives on devices"),
}


@pytest.mark.parametrize(
    ("requested", "engine", "size", "problem", "torch", "module", "kinds", "reason"), DEVICES.values(), ids=DEVICES
)
def test_choice_of_device_collectives(
    requested: str,
    engine: str,
    size: int,
    problem: str,
    torch: bool,
    module: str | None,
    kinds: tuple[str, ...],
    reason: str,
) -> None:
    config = Config.from_environ({"CHOROS_DEVICES": requested})
    *chosen, why = select_devices(engine, size, config, lambda name: torch or name != "torch", lambda: problem)
    assert chosen == [module, kinds]
    assert reason in why


def test_device_collectives_that_cannot_be_used_are_an_error_if_they_are_requested() -> None:
    for requested, text in {"nccl4py": NO_DRIVER, "torch": "PyTorch is not installed"}.items():
        config = Config.from_environ({"CHOROS_DEVICES": requested})
        with pytest.raises(EngineUnavailable, match=f"CHOROS_DEVICES={requested} cannot be used, because {text}"):
            select_devices("mpi", 2, config, lambda name: False, lambda: NO_DRIVER)
    with pytest.raises(ConfigError, match="CHOROS_DEVICES='nccl' is not one of auto, nccl4py, torch, host"):
        Config.from_environ({"CHOROS_DEVICES": "nccl"})


def test_verbose_shows_the_engine_and_what_moves_tensors_on_devices_once() -> None:
    script = "import choros; choros.init(); choros.global_process_set.communicator.devices"
    command = [CHOROSRUN, "-np", "2", "--verbose", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr.count("choros: engine mpi: Open MPI's mpirun started 2 ranks") == 1
    assert done.stderr.count("choros: tensors on devices: ") == 1


def test_an_elastic_job_whose_engine_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CHOROS_ELASTIC", "1")
    # Open MPI leaves its shared memory behind, where no launcher has started it.
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))
    for engine, said in (("local", 1), ("mpi", 0)):
        monkeypatch.setenv("CHOROS_ENGINE", engine)
        command = [sys.executable, "-c", "import choros; choros.init()"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stderr.count("does not go on without a rank that is lost") == said
