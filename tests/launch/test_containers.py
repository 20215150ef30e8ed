"""Jobs where little is left of what containers restrict: shared memory, files, directories, the terminal.

Mount namespaces restrict them: they need root and ``unshare``.
"""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from choros.settings import SESSION_BYTES
from launch.launched import CHOROSRUN, SLOW_START, rank_script
from launch.namespaces import contained

TRAINING = """
import choros, numpy
choros.init()
communicator = choros.comm.global_process_set.communicator

def train():
    for items in (1, 1000, 4000, 1 << 20):
        array = numpy.full(items, 1 + rank, numpy.float32)
        for _ in range(20):
            assert (communicator.allreduce(array) == 1.5).all()
        communicator.allgather(array)
        communicator.alltoall(numpy.ones(2 * items))
    print("trained")

train()
"""
#: Takes what is left of the shared memory, once the job has begun to use it.
FILL = """
if rank == 0:
    with open("/dev/shm/full", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
communicator.barrier()
train()
"""
HELLO = "print('hello\\n' * 20_000); sys.stderr.write('warning\\n')"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "more"), [("64k", ""), ("40m", FILL)], ids=["too small", "fills up"])
def test_training_with_little_shared_memory_files_and_home(tmp_path, size, more):
    home = tmp_path / "home"
    home.mkdir()
    script = rank_script(tmp_path / "train.py", TRAINING + more)
    mounts = ((f"size={size}", "/dev/shm"), ("ro", home))
    shell = f"export HOME={home}; ulimit -n 64"
    ended = contained(["-np", 2, sys.executable, script], *mounts, shell=shell)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("trained") == (4 if more else 2)


@pytest.mark.slow
def test_a_full_disk_for_the_output(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    script = rank_script(tmp_path / "hello.py", HELLO)
    ended = contained(["-np", 2, "--output-dir", logs, sys.executable, script], ("size=16k", logs))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("hello") == 40_000
    assert ended.stderr.count("chorosrun: --output-dir: a file cannot be written (No space left on device).") == 1


@pytest.mark.slow
def test_no_new_rank_is_started_where_mpirun_has_no_room_for_it(tmp_path):
    """SIGBUS would end mpirun, and all ranks."""
    script, temporary = Path(__file__).parents[1] / "elastic" / "new_ranks_script.py", tmp_path / "tmp"
    temporary.mkdir()
    command = ["-np", 3, "--min-np", 1, sys.executable, script, "1", "full"]
    ended = contained(command, ("size=24m", temporary), shell=f"cd {tmp_path}; export TMPDIR={temporary}")
    assert (ended.returncode, ended.stdout.count("of 2: 2")) == (0, 2), ended
    assert "has less than 4 MiB left. The job goes on with fewer ranks" in ended.stderr
    assert "a new rank" not in ended.stderr


def test_no_room_for_temporary_files(tmp_path):
    shell = f"export TMPDIR={tmp_path}"
    ended = contained(["-np", 2, "true"], (f"size={SESSION_BYTES // 2}", tmp_path), shell=shell)
    assert ended.returncode == 70
    assert ended.stderr == (
        f"chorosrun: the job needs a directory in {tmp_path}, which is read-only or has less than 4 MiB left. "
        "Set TMPDIR to another one.\n"
    )


@pytest.mark.parametrize(("path", "problem"), [("logs", "Not a directory"), (".", "File exists")])
def test_an_output_directory_that_cannot_be_made(tmp_path, path, problem):
    (tmp_path / "logs").touch()
    (tmp_path / "rank.1").touch()
    command = [*CHOROSRUN, "-np", "2", "--output-dir", tmp_path / path, "true"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"chorosrun: --output-dir {tmp_path}")
    assert ended.stderr.endswith(f" cannot be created: {problem}.\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "sentence"),
    [(">/dev/full", "chorosrun: standard output cannot be written (No space left on device)"), (">&- <&-", "warning")],
    ids=["full", "closed"],
)
def test_standard_output_that_cannot_be_written(tmp_path, redirection, sentence):
    script = rank_script(tmp_path / "hello.py", HELLO)
    command = ["sh", "-c", f'"$@" {redirection}', "sh", *CHOROSRUN, "-np", "1", sys.executable, script]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    assert sentence in ended.stderr
    assert "warning" in ended.stderr
    assert "Error" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "code"), [(["--timeout", "12"], 124), ([], 143)], ids=["timeout", "SIGTERM"])
def test_a_job_ends_though_its_output_is_not_read(tmp_path, flags, code):
    """The pipe is full, as behind a pager that waits for a key."""
    script = rank_script(tmp_path / "endless.py", 'while True:\n    print("x" * 200, flush=True)\n')
    command = [*CHOROSRUN, "-np", "2", *flags, sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        if not flags:
            assert job.stdout.readline()  # the ranks run, and write more than a pipe takes
            writer = os.open(f"/proc/{job.pid}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
            while select.select([], [writer], [], 0)[1]:  # it is not full yet
                time.sleep(0.01)
            os.close(writer)
            job.terminate()
        assert job.wait(120) == code
        said = job.stderr.read()
    assert "standard output cannot be written (it is not read); the job continues without it." in said
    assert ("--timeout 12" if flags else "terminated") in said


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--nonsense"], 2), (["--cycle-time-ms", "5", "-np", "1", "true"], 0)]
)
def test_messages_that_cannot_be_written_change_no_exit_code(arguments, code):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([*CHOROSRUN, *arguments], stderr=writer, timeout=120, check=False)
    finally:
        os.close(writer)
    assert ended.returncode == code


def test_ranks_may_have_another_directory_for_temporary_files(tmp_path):
    command = [*CHOROSRUN, "-np", "2", "--env", f"TMPDIR={tmp_path}", sys.executable, "-c"]
    code = "import tempfile, choros; choros.init(); print(tempfile.gettempdir())"
    ended = subprocess.run([*command, code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, SLOW_START.sub("", ended.stderr)) == (0, "")
    assert sorted(ended.stdout.split()) == sorted(f"[0] {tmp_path} [1] {tmp_path}".split())


def test_information_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [*CHOROSRUN, "--dry-run", "-np", "1", "true"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 70
    assert ended.stderr.startswith("chorosrun: the operating system refused")
    assert ended.stderr.count("\n") == 1
