"""Jobs of real processes: their output, exit codes and cleanup."""

import os
import re
import signal
import sys
import time

import psutil
import pytest

from choros import durations
from choros.launch.plan.cores import usable_cores
from harness import needs
from launch.launched import Running, rank_script, run

pytestmark = pytest.mark.slow

PYTHON = sys.executable


def test_output_and_settings(tmp_path):
    """All output of a job without a failure, in one job."""
    script = rank_script(
        tmp_path / "script.py",
        "env = os.environ\n"
        "print('out', rank, len(os.sched_getaffinity(0)), env['OMP_NUM_THREADS'], env['MKL_NUM_THREADS'])\n"
        "print('err', rank, file=sys.stderr)\n"
        "print('unbuffered:', os.environ['PYTHONUNBUFFERED'], 'mine:', os.environ['MINE'])\n"
        "print('stdin:', repr(sys.stdin.read()))\n"
        "sys.stdout.buffer.write(b'bytes \\xff\\x80\\n')\n"
        "sys.stdout.write('50%\\r100%\\n')\n"
        "print('no end', end='')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    import traceback; traceback.print_exc()\n"
        "time.sleep(1.5)\n"
        "print('after', file=sys.stderr)\n",
    )
    ended = run(
        *("-np", "2", "--no-merge-output", "--output-dir", tmp_path / "logs"),
        *("--env", "MINE=s3cret", "--env", "MKL_NUM_THREADS=5", PYTHON, script),
    )
    assert ended.code == 0, ended.err
    for rank in range(2):
        mine = [line for line in re.split(r"[\r\n]+", ended.out) if line.startswith(f"[{rank}] ")]
        assert [line.removeprefix(f"[{rank}] ") for line in mine] == [
            mine[0].removeprefix(f"[{rank}] "),
            "unbuffered: 1 mine: s3cret",
            "stdin: ''",
            "bytes \udcff\udc80",
            "50%",
            "100%",
            "no end",
        ]
        _, number, cpus, threads, mkl = mine[0].removeprefix(f"[{rank}] ").split()
        assert (number, mkl) == (str(rank), "5")
        assert 1 <= int(threads) <= int(cpus) <= os.cpu_count()
        logs = tmp_path / "logs" / f"rank.{rank}"
        assert (logs / "stdout").read_bytes().endswith(b"bytes \xff\x80\n50%\r100%\nno end")
        errors = (logs / "stderr").read_text()
        assert errors.startswith(f"err {rank}\nTraceback")
        assert errors.endswith("ZeroDivisionError: division by zero\nafter\n")
    assert ended.err.count("ZeroDivisionError: division by zero") == 2  # handled, and shown all the same
    assert "chorosrun" not in ended.err


def test_a_traceback_of_a_rank_that_ends_with_0_is_output_like_any_other():
    script = "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()"
    ended = run("-np", "2", "--no-merge-output", PYTHON, "-c", script)
    assert ended.code == 0, ended.err
    for rank in range(2):
        assert f"[{rank}] ZeroDivisionError: division by zero" in ended.err
    assert "chorosrun" not in ended.err


def test_the_output_of_one_rank_is_that_of_the_command():
    ended = run(PYTHON, "-c", "import sys; print('a'); print('b', file=sys.stderr)")
    assert (ended.code, ended.out, ended.err) == (0, "a\n", "b\n")


def test_output_passes_mpirun_by_where_wrappers_find_chorosruns_pipes(tmp_path):
    mpirun = os.path.join(os.path.dirname(PYTHON), "mpirun")
    silent = tmp_path / "mpirun"
    silent.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {mpirun} "$@"\nexec {mpirun} "$@" > /dev/null\n')
    silent.chmod(0o700)
    code = "print('a' * 300_000); print('b')"
    for how in (("--mpirun", silent), ("--env", f"CHOROS_TMPDIR={tmp_path}")):  # the second: mpirun forwards the output
        ended = run(*how, PYTHON, "-c", code)
        assert (ended.code, ended.out, ended.err) == (0, "a" * 300_000 + "\nb\n", "")


def test_no_prefix_and_more_ranks_than_cores():
    size = os.cpu_count() + 1
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['OMPI_MCA_mpi_yield_when_idle'])"
    ended = run("-np", size, "--no-prefix-output", PYTHON, "-c", code)
    assert (ended.code, ended.out) == (0, "1 1\n" * size)


def test_ranks_that_wait_in_mpi_leave_their_cores_to_others():
    """By sleeping: Linux 6.18 has let ranks that only yield keep all cores for minutes."""
    code = """
import time
import choros
choros.init()
from mpi4py import MPI
if choros.rank() > 0:
    time.sleep(1)
began = time.process_time()
MPI.COMM_WORLD.Barrier()
if choros.rank() == 0:
    print(time.process_time() - began)
"""
    ended = run("-np", os.cpu_count() + 1, "--no-prefix-output", PYTHON, "-c", code)
    assert ended.code == 0, ended.err
    assert float(ended.out) < 0.5


def test_far_more_ranks_than_cores_are_reported():
    cores = usable_cores()
    ended = run("-np", 4 * cores + 1, "--no-prefix-output", PYTHON, "-c", "print(1)")
    assert (ended.code, ended.out) == (0, "1\n" * (4 * cores + 1))
    assert f"chorosrun: {4 * cores + 1} ranks share the {cores} core" in ended.err


def test_a_rank_that_raises(tmp_path):
    """Rank 1 raises; rank 0 sleeps, rank 2 ignores SIGTERM, and has a child that does, too."""
    script = rank_script(
        tmp_path / "script.py",
        "if rank == 2:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "ready()\n"
        "if rank == 1:\n"
        f"    while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        "    raise ValueError('on purpose')\n"
        "time.sleep(60)\n",
    )
    with Running("-np", "3", "--output-dir", tmp_path / "logs", PYTHON, script) as job:
        job.wait_for(3, "ready")
        assert len(job.processes()) >= 3
        (tmp_path / "go").touch()
        ended = job.end()
        assert ended.seconds < 30  # five to stop the others, who would sleep for a minute
        job.assert_nothing_left()
    assert ended.code == 1
    headline = r"chorosrun: rank 1 on \S+ failed with exit code 1 \(ValueError\); the other 2 ranks were stopped\."
    traceback = r"Traceback \(most recent call last\):\n(  .*\n)+ValueError: on purpose\n"
    assert re.fullmatch(f"{headline}\n{traceback}", ended.err), ended.err
    assert (ended.out + ended.err).count("ValueError: on purpose") == 1
    assert (tmp_path / "logs" / "rank.1" / "stderr").read_text().endswith("ValueError: on purpose\n")


def test_all_ranks_raise():
    code = "import os, time; time.sleep(0.5); raise RuntimeError('same for all')"
    ended = run("-np", "3", PYTHON, "-c", code)
    assert ended.code == 1
    assert (ended.out + ended.err).count("same for all") == 1
    assert ended.err.rstrip().endswith("RuntimeError: same for all")


@needs("torch")
def test_a_rank_that_raises_and_ends_late_is_the_cause(tmp_path):
    """Rank 0 has ended, because it has lost rank 1, before rank 1 has."""
    body = (
        "import atexit; rank == 1 and atexit.register(time.sleep, 60)\n"
        "import choros; choros.init()\n"
        "if rank == 1: raise ValueError('mine')\n"
        "choros.comm.global_process_set.communicator.barrier()\n"
    )
    env = {"CHOROS_ENGINE": "torch"}
    ended = run("-np", "2", PYTHON, rank_script(tmp_path / "script.py", body), env=env)
    assert ended.code == 1, ended.err
    assert "chorosrun: rank 0 failed too: PeerLostError." in ended.err
    assert re.search(r"rank 1 on \S+ failed with exit code 1 \(ValueError\)\.\n", ended.err)
    assert ended.err.endswith("ValueError: mine\n")


def test_an_exit_code(tmp_path):
    body = "print('last words', file=sys.stderr)\nif rank == 0: sys.exit(3)\ntime.sleep(60)\n"
    ended = run("-np", "2", PYTHON, rank_script(tmp_path / "script.py", body))
    assert ended.code == 3
    assert re.search(r"chorosrun: rank 0 on \S+ failed with exit code 3; the other rank was stopped\.", ended.err)
    assert ended.err.rstrip().endswith("on standard error:\nlast words")


def test_a_rank_that_is_killed(tmp_path):
    body = "ready()\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    ended = run("-np", "2", PYTHON, rank_script(tmp_path / "script.py", body))
    assert ended.code == 137
    assert re.search(r"rank 1 on \S+ was killed by SIGKILL \(signal 9\): out of memory", ended.err)


def test_ranks_may_end_one_after_the_other(tmp_path):
    body = "print('leaves', rank); time.sleep(1.5 * rank)\nif rank == 1: print('still here')\n"
    ended = run("-np", "2", PYTHON, rank_script(tmp_path / "script.py", body))
    assert (ended.code, ended.err) == (0, "")
    assert "[1] still here" in ended.out


def test_ending_without_mpi_finalize_is_ending_well():
    code = "import os; from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); print('well', flush=True); os._exit(0)"
    ended = run("-np", "2", PYTHON, "-c", code)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count("well") == 2


def test_mpi_abort():
    code = "import time; from mpi4py import MPI; c = MPI.COMM_WORLD; c.Barrier(); c.rank or c.Abort(5); time.sleep(60)"
    ended = run("-np", "2", PYTHON, "-c", code)
    assert ended.code == 5
    assert "chorosrun: " in ended.err


def test_timeout(tmp_path):
    with Running(
        "-np", "2", "--timeout", "3", PYTHON, rank_script(tmp_path / "s.py", "ready(); time.sleep(60)")
    ) as job:
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 124
    assert ended.err == ("chorosrun: the job ran longer than --timeout 3 and was stopped.\n")


def test_values_are_on_no_command_line(tmp_path):
    script = rank_script(tmp_path / "s.py", "ready(); time.sleep(60)")
    with Running("-np", "2", "--env", "FROM_SHELL", PYTHON, script, env={"FROM_SHELL": "hush-hush"}) as job:
        job.wait_for(2, "ready")
        lines = [" ".join(process.cmdline()) for process in job.processes()]
        assert len(lines) >= 5  # mpirun, two wrappers, two ranks
        assert not [line for line in lines if "hush-hush" in line]
        job.signal(signal.SIGINT)
        assert job.end().code == 130


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "chorosrun: no command given. Example: chorosrun -np 2 python train.py"),
        (("-np", "2"), 2, "no command given"),
        (("-np", "0", "python"), 2, "-np 0: expected a whole number from 1 to"),
        (("--nope", "python"), 2, "--nope"),
        (("-np", "2", "there-is-no-such-command"), 127, "chorosrun: command not found: 'there-is-no-such-command'."),
        (("-np", "2", sys.executable), 2, "would run nothing: the standard input of ranks is empty"),
        (("-np", "2", "python3", "-", "x"), 2, "python3 - x would run nothing"),
        (("-np", "3", "-H", "localhost:2", "python"), 2, "-np 3 requests more ranks than the hosts have slots"),
        (("-H", "a:1", "--hostfile", "f", "python"), 2, "give only one of them"),
        (("--mpirun", "/none", "python"), 2, "--mpirun /none: no such program"),
        (("-np", "2", "--min-np", "3", "python"), 2, "--min-np 3: the job starts with fewer ranks, -np 2."),
        (
            ("-np", "2", "--env", "CHOROS_ENGINE=fast", sys.executable, "x.py"),
            2,
            "CHOROS_ENGINE='fast' is not one of auto, local",
        ),
        (("--ssh-command", "reach", "-p", "22", "python"), 2, "--ssh-command reach: it replaces ssh, so --ssh-port"),
    ],
)
def test_invalid_arguments(arguments, code, message):
    ended = run(*arguments)
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_a_script_instead_of_a_command(tmp_path):
    (tmp_path / "train.py").touch()
    ended = run("./train.py", cwd=tmp_path)
    assert ended.code == 126
    assert "chorosrun … python ./train.py" in ended.err


def test_hosts_that_do_not_exist():
    hosts = ",".join(f"nohost-{number}.invalid:1" for number in range(99))
    ended = run("-H", hosts, PYTHON, "-c", "pass")
    assert ended.code == 68
    assert ended.seconds < 60  # they are checked at the same time
    assert "of 99 hosts cannot be reached (nohost-0.invalid: " in ended.err
    assert "and 95 more" in ended.err


def test_dry_run():
    ended = run("-np", "2", "--env", "TOKEN=hush", "--dry-run", PYTHON, "a b.py")
    command, *ranks = ended.out.splitlines()
    assert ended.code == 0
    assert command.startswith(os.path.join(os.path.dirname(PYTHON), "mpirun "))
    told = re.escape("""'{"gated":true}'""")
    assert re.search(rf"-np 2 {PYTHON} -I -S \S+/wrapper/__main__.py {told} {PYTHON} 'a b.py'$", command)
    assert [line.split(":")[0] for line in ranks] == ["# rank 0 on localhost", "# rank 1 on localhost"]
    assert "hush" not in ended.out


def test_versions():
    assert run("--version").out.startswith("choros ")


def test_large_output_is_complete():
    code = "for i in range(4000): print(i, 'x' * (i % 700))"
    ended = run("-np", "2", PYTHON, "-c", code)
    for rank in range(2):
        mine = [line for line in ended.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {i} {'x' * (i % 700)}" for i in range(4000)]


def test_large_output_on_standard_error_after_a_traceback_is_not_slow():
    code = (
        "import sys, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        "for i in range(50_000): print(i, 'x' * 90, file=sys.stderr)\n"
    )
    ended = run("-np", "1", PYTHON, "-c", code, seconds=30)
    assert ended.code == 0
    lines = ended.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-50_000:] == [f"{i} {'x' * 90}" for i in range(50_000)]


def test_lines_that_ranks_write_together_are_merged():
    code = (
        "import sys, time\n"
        "from mpi4py import MPI\n"
        "for i in range(20):\n"
        "    time.sleep(0.01)\n"
        "    MPI.COMM_WORLD.Barrier()\n"
        "    print('both', i, file=sys.stderr)\n"
        "    print('alone', MPI.COMM_WORLD.rank, i, file=sys.stderr)\n"
    )
    ended = run("-np", "2", PYTHON, "-c", code)
    assert (ended.code, ended.out) == (0, "")
    assert "[0-1] both" in ended.err
    for rank in range(2):  # nothing is lost, and the order of its lines is kept
        mine = re.findall(rf"^\[(?:{rank}|0-1)\] (.*)$", ended.err, re.MULTILINE)
        assert mine == [line for i in range(20) for line in (f"both {i}", f"alone {rank} {i}")]


def test_a_reader_that_closes_the_pipe_does_not_end_the_job(tmp_path):
    script = rank_script(
        tmp_path / "s.py", f"ready(); time.sleep(1); print('x'); open({str(tmp_path / 'done')!r}, 'w')"
    )
    with Running("-np", "1", PYTHON, script) as job:
        job.wait_for(1, "ready")
        job.process.stdout.close()
        assert job.process.wait(30) == 0
    assert (tmp_path / "done").exists()


def test_no_zombies_and_no_busy_waiting(tmp_path):
    """While a job sleeps, chorosrun and its wrappers use almost no CPU time."""
    with Running("-np", "2", PYTHON, rank_script(tmp_path / "s.py", "ready(); time.sleep(60)")) as job:
        job.wait_for(2, "ready")
        ours = [psutil.Process(job.process.pid)]
        ours += [process for process in job.processes() if "__main__.py" in " ".join(process.cmdline()[:4])]
        assert len(ours) == 3
        wrappers = ours[1:]
        assert [process.memory_full_info().uss < 15_000_000 for process in wrappers] == [True, True]
        began, before = time.monotonic(), sum(sum(process.cpu_times()[:2]) for process in ours)
        switches = [process.num_ctx_switches().voluntary for process in wrappers]
        time.sleep(2)
        if sys.platform == "linux":  # only to look at the ranks' steps; the last line may still be on its way
            now = [process.num_ctx_switches().voluntary for process in wrappers]
            looks = (time.monotonic() - began) / (durations.PROGRESS.seconds * float(os.environ[durations.TEST_SCALE]))
            assert max(later - earlier for later, earlier in zip(now, switches, strict=True)) <= looks + 1
        assert sum(sum(process.cpu_times()[:2]) for process in ours) - before < 0.1 * (time.monotonic() - began)
        job.signal(signal.SIGTERM)
        assert job.end().code == 143
