"""What facts say about a machine: facts become findings."""

import re
import time
from dataclasses import replace

import pytest

from choros.doctor.checks import OK, PROBLEM, WARNING, Finding, check_machine, compare
from choros.doctor.cli import as_text
from choros.doctor.facts import DirectoryFacts, MachineFacts, PackageFacts, _ended, _start
from choros.settings import ENGINES

ROOM = DirectoryFacts("/data", 1 << 40, 1 << 39)
HEALTHY = MachineFacts(
    name="a",
    python="3.12.1",
    executable="/bin/python",
    choros="0.1.0",
    packages={name: PackageFacts("1.2") for name in ("tensorflow", "torch", "jax", "keras", "mpi4py")},
    mpirun="mpirun (Open MPI) 5.0.9",
    mpirun_path="/bin/mpirun",
    survives=True,
    shared_memory=replace(ROOM, path="/dev/shm"),
    temporary=ROOM,
    current=ROOM,
    open_files=(65536, 65536),
    cores=8,
    allowed=16,
    processors=16,
    numa_nodes=2,
)


def packages(**changed):
    return {**HEALTHY.packages, **changed}


BROKEN = PackageFacts(problem="ImportError: no libstdc++")
NO_FRAMEWORK = packages(tensorflow=BROKEN, torch=BROKEN, jax=PackageFacts())
MPI = {"mpirun": "", "mpirun_problem": "no mpirun is installed on this machine. Install one with: pip install x"}


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"packages": packages(torch=BROKEN)}, "torch", WARNING, "cannot be imported: ImportError: no libstdc"),
        ({"packages": packages(torch=BROKEN)}, "engine torch (Gloo)", OK, "PyTorch cannot be imported"),
        ({"packages": packages(jax=PackageFacts())}, "jax", OK, "is not installed; .* 'choros.jax.'"),
        ({"packages": NO_FRAMEWORK}, "frameworks", PROBLEM, "no framework to train with"),
        (MPI, "mpi", PROBLEM, r"^No mpirun is installed on this machine\.$"),
        (MPI, "engine mpi", PROBLEM, "there is no mpirun"),
        ({"packages": packages(mpi4py=BROKEN)}, "engine mpi", PROBLEM, "mpi4py cannot be imported"),
        ({"survives": False}, "ulfm", WARNING, "no ULFM"),
        ({"mpirun": "mpirun (Open MPI) 5.0.10"}, "ulfm", WARNING, "if a second one dies"),
        ({"mpirun": "mpirun (Open MPI) 5.0.12"}, "ulfm", OK, "goes on without"),
        ({"shared_memory": DirectoryFacts("/dev/shm", 1 << 20, 1 << 20)}, "shared memory", WARNING, "1 MiB left of 1"),
        ({"shared_memory": replace(ROOM, problem="Read-only file system")}, "shared memory", WARNING, "Read-only"),
        ({"open_files": (64, 64)}, "open files", WARNING, "open 64 files"),
        ({"open_files": (64, 4096)}, "open files", WARNING, "open 64 files; two ranks need 64"),
        ({"fabric": True, "locked_memory": 65536}, "locked memory", WARNING, "lock 64 KiB, and InfiniBand"),
        ({"processes": 100}, "processes", WARNING, "Only 100 processes"),
        ({"quota": 1.5}, "cores", WARNING, "quota is the time of 1.5"),
        ({"cores": 1, "allowed": 1}, "cores", WARNING, "1 of 16 processors may be used"),
        ({"accelerators": 2, "devices": "copied through host memory, because …"}, "gpu collectives", WARNING, "copied"),
        ({"accelerators": 1, "gpus": ("A100",), "devices": "NCCL moves those"}, "gpus", OK, r"^1 GPU: A100\.$"),
        ({"gpu_problem": "nvidia-smi is …"}, "gpus", WARNING, "nvidia-smi"),
        ({"temporary": replace(ROOM, free=1000)}, "temporary files", PROBLEM, "a job needs 4 MiB"),
        ({"temporary": replace(ROOM, free=100 << 20)}, "temporary files", WARNING, "only 100 MiB left"),
        ({"requested_temporary": "/none"}, "temporary files", WARNING, "TMPDIR is /none.* /data is used"),
        ({"current": replace(ROOM, problem="No space left")}, "current directory", WARNING, "No space left"),
        ({"loopback_problem": "refused"}, "ports", PROBLEM, "refused"),
        ({"settings_problem": "CHOROS_ENGINE='x' is not …"}, "settings", PROBLEM, "CHOROS_ENGINE"),
    ],
)
def test_what_is_broken_is_named(changes, check, level, words):
    found = [each for each in check_machine(replace(HEALTHY, **changes)) if each.check == check]
    assert found[0].level == level
    assert re.search(words, found[0].text), found[0].text
    assert bool(found[0].fix) == (level != OK)


def test_a_healthy_machine_is_ok():
    findings = check_machine(HEALTHY)
    assert {each.level for each in findings} == {OK}
    assert not [each for each in findings if each.fix]
    assert {f"engine {name}" for name in ENGINES} == {
        " ".join(each.check.split()[:2]) for each in findings if each.check.startswith("engine ")
    }


def test_a_build_of_pytorch_without_gpus():
    facts = replace(HEALTHY, accelerators=1, devices="NCCL", packages=packages(torch=PackageFacts("2.9+cpu")))
    (found,) = [each for each in check_machine(facts) if each.level != OK]
    assert (found.check, found.text) == ("torch", "PyTorch 2.9+cpu is a build without GPUs.")


def test_facts_of_another_platform_are_enough():
    assert not [each for each in check_machine(replace(HEALTHY, shared_memory=None, numa_nodes=0)) if each.level != OK]


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, OK, "have the versions of this machine"),
        ({"python": "3.12.9"}, OK, "have the versions"),
        ({"python": "3.11.1"}, PROBLEM, "Python is 3.11 there and 3.12 here"),
        ({"choros": "0.0.9"}, PROBLEM, "choros is 0.0.9 there and 0.1.0 here"),
        ({"mpirun": "mpirun (Open MPI) 4.1"}, PROBLEM, "mpirun is mpirun .Open MPI. 4.1 there"),
        ({"packages": packages(jax=PackageFacts("0.1"))}, WARNING, "JAX is 0.1 there and 1.2 here"),
        ({"packages": packages(jax=PackageFacts())}, WARNING, "JAX is not installed there"),
    ],
)
def test_versions_of_another_host(changes, level, words):
    found = [each for each in compare(HEALTHY, replace(HEALTHY, **changes), "b", 0.0) if each.check == "versions"]
    assert (found[0].host, found[0].level) == ("b", level)
    assert re.search(words, found[0].text)


@pytest.mark.parametrize(("ahead", "words"), [(3.0, "3 s ahead of"), (-60.0, "60 s behind")])
def test_the_clock_of_another_host(ahead, words):
    (found,) = [each for each in compare(HEALTHY, HEALTHY, "b", ahead) if each.level != OK]
    assert (found.check, found.level) == ("clock", WARNING)
    assert words in found.text


def test_what_is_wrong_on_another_host_is_said_of_it():
    found = compare(HEALTHY, replace(HEALTHY, open_files=(64, 64)), "b", 0.0)
    assert [(each.host, each.check) for each in found if each.level != OK] == [("b", "open files")]


def test_text():
    findings = [Finding("mpi", OK, "Fine."), Finding("ssh", PROBLEM, "Refused.", "start sshd", "b")]
    assert as_text(findings, {"localhost": HEALTHY}).splitlines()[-4:-2] == [
        "  \x1b[31mproblem\x1b[0m  ssh  Refused.",
        "                → start sshd",
    ]


@pytest.mark.parametrize(
    ("code", "end", "problem"),
    [
        ("import time; time.sleep(1000)", 0, "its import takes more than 120 s"),
        ("import os; os.abort()", 60, "its import was ended by SIGABRT"),
        ("raise ImportError('no libcuda')", 60, "ImportError: no libcuda"),
        ("raise SystemExit(3)", 60, "its import ended with exit code 3"),
    ],
)
def test_imports_that_hang_crash_or_fail(code, end, problem):
    assert _ended(_start(code, {}), time.monotonic() + end) == PackageFacts(problem=problem)
