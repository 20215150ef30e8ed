"""MPI implementations, accelerators, and versions."""

import sys
from pathlib import Path

import pytest

from choros.errors import ConfigError
from choros.launch.cli import version_text
from choros.launch.driver.machine import count_accelerators, detect_mpirun
from choros.launch.plan.mpi_implementations import (
    INTEL_MPI,
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    Mpirun,
    implementation_of,
)


@pytest.mark.parametrize(
    ("version", "implementation"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …", OPEN_MPI_5),
        ("mpirun (Open MPI) 6.0.0", OPEN_MPI_5),
        ("mpirun (Open MPI) 4.1.6", OPEN_MPI_4),
        ("mpiexec (OpenRTE) 4.1.6", OPEN_MPI_4),
        ("prterun (PRRTE) 3.0.9", OPEN_MPI_5),
        ("HYDRA build details:\n    Version:  4.2.1", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", INTEL_MPI),
        ("GNU coreutils 9", None),
        ("", None),
    ],
)
def test_implementations(version, implementation):
    assert implementation_of(version) is implementation


def test_the_mpirun_beside_python_is_the_default():
    mpirun = detect_mpirun()
    assert Path(mpirun.path).parent == Path(sys.executable).parent
    assert mpirun.implementation is OPEN_MPI_5
    assert mpirun.environment() == {}


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_clusters_own_mpirun_has_its_own_library(tmp_path):
    path = script(tmp_path / "bin" / "mpirun", "echo 'mpirun (Open MPI) 4.1.6'")
    (tmp_path / "lib").mkdir()
    for name in ("libmpi.so", "libmpi.so.40"):
        (tmp_path / "lib" / name).touch()
    mpirun = detect_mpirun(str(path))
    assert mpirun.implementation is OPEN_MPI_4
    assert mpirun.environment() == {"MPI4PY_LIBMPI": str(tmp_path / "lib" / "libmpi.so.40")}


def test_an_unknown_mpirun_is_an_error(tmp_path):
    path = script(tmp_path / "mpirun", "echo something else")
    with pytest.raises(ConfigError, match=r"is not a supported mpirun .* Its --version printed: 'something else'"):
        detect_mpirun(str(path))


def test_a_missing_mpirun_is_an_error():
    with pytest.raises(ConfigError, match="--mpirun /none: no such program"):
        detect_mpirun("/none")


def test_accelerators_of_nvidia(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_accelerators(tmp_path / "gpus", tmp_path / "none", tmp_path) == 2


def test_accelerators_of_a_container_are_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    for number in range(8):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    assert count_accelerators(tmp_path / "gpus", tmp_path / "none", tmp_path) == 0
    (tmp_path / "nvidia5").touch()
    assert count_accelerators(tmp_path / "gpus", tmp_path / "none", tmp_path) == 1


def test_accelerators_of_amd(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    for node, simds in enumerate((0, 416, 416)):
        (tmp_path / "nodes" / str(node)).mkdir(parents=True)
        (tmp_path / "nodes" / str(node) / "properties").write_text(f"cpu_cores_count 1\nsimd_count {simds}\n")
    assert count_accelerators(tmp_path / "none", tmp_path / "nodes") == 2


MPIRUN = Mpirun("/bin/mpirun", OPEN_MPI_5, "mpirun (Open MPI) 5.0.11")


def test_versions():
    lines = version_text(MPIRUN).splitlines()
    assert [line.split()[0] for line in lines] == ["choros", "mpi4py", "mpirun:", "Python"]
    assert "5.0.11" in lines[2]
