"""Jobs on hosts as users have them: through sshd, and through SLURM's daemons."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from harness import FRAMEWORKS
from launch.launched import CHOROSRUN, run
from launch.namespaces import several_hosts
from launch.real_hosts import SSH_PORTS, real_hosts, start_slurm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("digits_horovod.py")
#: As in a shell in which chorosrun and Python are those of this environment, with a secret for ranks without chorosrun.
SHELL = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "CHOROS_SECRET": "5e" * 16}
PLACES = ["0 of 4, 0 of 2", "1 of 4, 1 of 2", "2 of 4, 0 of 2", "3 of 4, 1 of 2"]

SHOW_RANK = (
    "import os, choros\nchoros.init()\nprint(choros.rank(), choros.size(), choros.local_rank(), os.uname().nodename)\n"
)
RAISE = (
    "import choros\n"
    "from choros.parallel.objects import allgather_object\n"
    "choros.init()\n"
    "allgather_object('before')\n"
    "if choros.rank() == 3:\n"
    "    raise ValueError('on purpose')\n"
    "allgather_object('never')\n"
)
#: Each row's weight counts how often it was trained on: in each of two epochs.
FIT = """
import time, keras, numpy as np
import choros.distribute as dist

class Total(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]

class Slow(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        print('batch', self.epoch, batch, flush=True)
        time.sleep(0.2)

with dist.MultiWorkerMirroredStrategy().scope():
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer='zeros')
    model = keras.Sequential([keras.Input((96,)), layer])
    model.compile(keras.optimizers.SGD(1.0), Total(reduction='sum'))
x, y = np.eye(96, dtype='float32'), np.zeros((96, 1), 'float32')
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Slow()])
print('counts', sorted(set((-model.get_weights()[0]).ravel().tolist())))
"""
SAVE = (
    "import os, signal, sys, time\n"
    "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
    "def save(*_):\n"
    "    print('saved', rank, flush=True)\n"
    "    sys.exit()\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "print('ready', flush=True)\n"
    "time.sleep(120)\n"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hosts")
    with several_hosts(directory) as network, real_hosts(network, directory) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def slurm(hosts):
    start_slurm(hosts)
    return hosts


@pytest.fixture(scope="module")
def accuracy(hosts):
    """The line that one process prints."""
    alone = hosts.run("python", SCRIPT, cwd=hosts.directory, env=SHELL)
    assert (alone.returncode, alone.stderr) == (0, "")
    (line,) = re.findall(r"accuracy 0\.9.*", alone.stdout)
    return line


def chorosrun(hosts, directory, *arguments):
    return run(*arguments, start=(*hosts.start(directory), *CHOROSRUN), env=SHELL)


def srun(hosts, directory, *arguments):
    """Errors are shown; that it waits until SLURM has cleaned up after the previous job is not."""
    return hosts.run("srun", "--quiet", "-N", "2", *arguments, cwd=directory, env=SHELL)


def places(output):
    return sorted(re.findall(r"rank (.*)", output))


def script_of(directory, text):
    path = directory / "s.py"
    path.write_text(text)
    return path


def traceback_of(script):
    return f'Traceback (most recent call last):\n  File "{script}", line 6, in <module>\n'


class Batch:
    """A batch job: ``deploy/slurm.sh``, or another script, with a command."""

    def __init__(self, hosts, directory, *arguments, script="slurm.sh", env=None):
        self.hosts, self.directory, self.env = hosts, directory, {**SHELL, **(env or {})}
        submitted = self._run("sbatch", "--parsable", ROOT / "deploy" / script, *arguments)
        assert submitted.returncode == 0, submitted
        self.number = submitted.stdout.strip()

    @property
    def output(self):
        path = self.directory / f"slurm-{self.number}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, count, word, seconds=120):
        end = time.monotonic() + seconds
        while self.output.count(word) < count:
            assert time.monotonic() < end, self.output
            time.sleep(0.1)

    def terminate(self):
        """What SLURM does before the job's time is up."""
        assert self._run("scancel", "--batch", "--signal", "TERM", self.number).returncode == 0

    def requeue(self):
        """What SLURM does when another job preempts this one."""
        assert self._run("scontrol", "requeue", self.number).returncode == 0

    def end(self, seconds=120):
        """Waits for its end; returns its state and its exit code."""
        end = time.monotonic() + seconds
        while True:
            shown = self._run("scontrol", "show", "job", "--oneliner", self.number).stdout
            state, code = re.search(r"JobState=(\w+)", shown)[1], re.search(r" ExitCode=(\d+):", shown)[1]
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state, int(code)
            assert time.monotonic() < end, (shown, self.output)
            time.sleep(0.1)

    def _run(self, *command):
        return self.hosts.run(*command, cwd=self.directory, env=self.env)


@pytest.mark.program
def test_chorosrun_through_ssh(hosts, accuracy, tmp_path):
    ended = chorosrun(hosts, tmp_path, "-np", "4", "-H", "n1:2,n2:2", "python", SCRIPT)
    assert (ended.code, ended.err) == (0, "")
    assert f"[0] {accuracy}\n" in ended.out
    assert places(ended.out) == PLACES


def test_a_rank_that_raises_on_a_host_reached_through_ssh(hosts, tmp_path):
    login = ("--ssh-port", str(SSH_PORTS[1]), "--ssh-identity-file", hosts.key)
    script = script_of(tmp_path, RAISE)
    ended = chorosrun(hosts, tmp_path, *login, "-H", "n1:2,n2:2", "python", script)
    assert ended.code == 1
    assert "chorosrun: rank 3 on n2 failed with exit code 1 (ValueError)" in ended.err
    assert traceback_of(script) in ended.err
    assert ended.err.endswith("ValueError: on purpose\n")
    fingerprint = hosts.run("ssh-keygen", "-l", "-f", hosts.key, cwd=tmp_path).stdout.split()[1]
    logins = (hosts.directory / "sshd-n2.log").read_text()
    assert re.search(rf"Accepted publickey for root from {hosts.addresses[0]} .* {re.escape(fingerprint)}\n", logins)


def test_a_host_that_ssh_does_not_know(hosts, tmp_path):
    address = hosts.addresses[1]
    ended = chorosrun(hosts, tmp_path, "-H", f"n1:1,{address}:1", "python", "-c", "pass")
    assert ended.code == 68
    assert f"the host cannot be reached ({address}: Host key verification failed.)" in ended.err
    assert f"that this works without a prompt: ssh -o BatchMode=yes {address} true" in ended.err


@pytest.mark.program
def test_sbatch(slurm, accuracy, tmp_path):
    batch = Batch(slurm, tmp_path, "python", SCRIPT)
    assert batch.end() == ("COMPLETED", 0), batch.output
    assert f"[0] {accuracy}\n" in batch.output
    assert places(batch.output) == PLACES


@pytest.mark.program
def test_sbatch_of_a_rank_that_raises(slurm, tmp_path):
    script = script_of(tmp_path, RAISE)
    batch = Batch(slurm, tmp_path, "python", script)
    assert batch.end() == ("FAILED", 1), batch.output
    assert "chorosrun: rank 3 on n2 failed with exit code 1 (ValueError)" in batch.output
    assert traceback_of(script) in batch.output
    assert batch.output.endswith("ValueError: on purpose\n")


@pytest.mark.program
def test_sbatch_before_the_time_is_up(slurm, tmp_path):
    batch = Batch(slurm, tmp_path, "python", script_of(tmp_path, SAVE))
    batch.wait_for(4, "ready")
    batch.terminate()
    batch.wait_for(4, "saved")
    assert batch.end()[1] == 143, batch.output


@pytest.mark.program
@pytest.mark.parametrize("how", ["requeue", pytest.param("terminate", marks=pytest.mark.nightly)])
def test_fit_goes_on_in_the_middle_of_an_epoch_when_its_job_is_queued_again(slurm, tmp_path, how):
    env = {"KERAS_BACKEND": FRAMEWORKS[0], "CHOROS_COMMIT_STEPS": "2"}
    batch = Batch(slurm, tmp_path, "python", script_of(tmp_path, FIT), script="slurm-requeue.sh", env=env)
    batch.wait_for(4, "batch 0 7")
    getattr(batch, how)()
    batch.wait_for(4, "counts")
    assert batch.end() == ("COMPLETED", 0), batch.output
    assert re.findall("counts (.*)", batch.output) == ["[2.0]"] * 4
    steps = batch.output.count("batch 0") / 4
    assert steps == 12 if how == "terminate" else 12 <= steps < 12 + 8  # eight had been made


@pytest.mark.program
def test_chorosrun_in_an_allocation_starts_its_tasks(slurm, tmp_path):
    script = script_of(tmp_path, SHOW_RANK)
    ended = slurm.run("salloc", "-N", "2", "-n", "4", "chorosrun", "python", script, cwd=tmp_path, env=SHELL)
    assert ended.returncode == 0, ended
    assert sorted(ended.stdout.splitlines()) == ["[0] 0 4 0 n1", "[1] 1 4 1 n1", "[2] 2 4 0 n2", "[3] 3 4 1 n2"]


#: As in a shell that ``srun --pty`` starts: the first task of a step that has all of the allocation.
FIRST_TASK = ("srun", "-N", "2", "-n", "2", "-c", "2", "sh", "-c", 'test "$SLURM_PROCID" != 0 || "$@"', "sh")


@pytest.mark.program
@pytest.mark.parametrize("within", [("salloc", "-N", "2", "-n", "4"), FIRST_TASK], ids=["salloc", "srun"])
def test_chorosrun_on_hosts_of_an_allocation_that_have_no_sshd(slurm, tmp_path, within):
    where = ("--ssh-port", "1", "-H", "n1:2,n2:2")
    ended = slurm.run(*within, "chorosrun", "--start-timeout", "30", *where, "hostname", cwd=tmp_path, env=SHELL)
    assert ended.returncode == 0, ended
    assert sorted(ended.stdout.split()) == sorted(["[0]", "n1", "[1]", "n1", "[2]", "n2", "[3]", "n2"])


@pytest.mark.program
def test_srun(slurm, accuracy, tmp_path):
    ended = srun(slurm, tmp_path, "-n", "4", "python", SCRIPT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"{accuracy}\n" in ended.stdout
    assert places(ended.stdout) == PLACES


@pytest.mark.program
def test_srun_of_a_rank_that_raises(slurm, tmp_path):
    script = script_of(tmp_path, RAISE)
    ended = srun(slurm, tmp_path, "-n", "4", "python", script)
    assert ended.returncode == 69, ended  # srun's is the highest: the others have lost a rank
    assert traceback_of(script) in ended.stderr
    assert "ValueError: on purpose\n" in ended.stderr
    assert "srun: error: n2: task 3: Exited with exit code 1" in ended.stderr


@pytest.mark.program
@pytest.mark.parametrize("step", [("srun",), ("salloc", "srun", "--het-group=0,1")], ids=["srun", "salloc"])
def test_components_of_a_heterogeneous_allocation_are_one_job(slurm, tmp_path, step):
    script, (first, *rest) = script_of(tmp_path, SHOW_RANK), step
    parts = ("--quiet", "-N", "1", "-n", "1", ":", "-N", "1", "-n", "2")
    ended = slurm.run(first, *parts, *rest, "python", script, cwd=tmp_path, env=SHELL)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == ["0 3 0 n1", "1 3 0 n2", "2 3 1 n2"]


@pytest.mark.program
def test_chorosrun_in_a_heterogeneous_allocation_says_how_to_start(slurm, tmp_path):
    parts = ("--quiet", "-N", "1", "-n", "1", ":", "-N", "1", "-n", "2")
    ended = slurm.run("salloc", *parts, "chorosrun", "python", "-c", "pass", cwd=tmp_path, env=SHELL)
    assert ended.returncode == 2
    assert "as tasks of srun --het-group=0,1" in ended.stderr


@pytest.mark.program
def test_srun_with_pmix(slurm, tmp_path):
    script = script_of(tmp_path, SHOW_RANK)
    ended = srun(slurm, tmp_path, "-n", "4", "--mpi=pmix", "python", script)
    if "can not load PMIx library" in ended.stderr:
        pytest.skip("needs Debian's libpmix-dev")
    assert ended.returncode == 0, ended
    assert sorted(ended.stdout.splitlines()) == ["0 4 0 n1", "1 4 1 n1", "2 4 0 n2", "3 4 1 n2"]
