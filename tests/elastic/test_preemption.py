"""Elastic jobs and ranks that are asked to end: real processes and signals. See ``fit_script.py`` for the faults."""

import signal
import sys
from pathlib import Path

import pytest

from elastic.test_lost_ranks import TORCH, check_validation, fit
from harness import needs
from launch.launched import Running, rank_script, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs("mpi4py")]


@pytest.mark.parametrize(
    ("framework", "api"),
    [
        ("torch", "strategy"),
        pytest.param("torch", "horovod", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", marks=pytest.mark.nightly),
    ],
)
def test_the_same_command_goes_on_in_the_middle_of_an_epoch(framework, api, tmp_path):
    commits = ("--commit-dir", tmp_path)
    for ranks, faults in ((3, "1@16=SIGTERM!"), (2, "0@4=SIGUSR1!")):
        ended, reports = fit(framework, faults, api, ranks=ranks, code=75, more=commits)
        assert reports == []
        assert "preempted: the ranks have ended" in ended.err
    ended, reports = fit(framework, "", api, more=commits)
    assert f"training goes on in epoch 2, from the commit in {tmp_path}" in ended.err
    assert len(reports) == 3
    for report in reports:
        assert report["wrong"] == {}
        assert report["rows"] == [203.0] * 3  # the metrics of the second epoch are those of all three runs


def test_a_job_ends_where_only_some_ranks_have_another_batch(tmp_path):
    commits = ("--commit-dir", tmp_path)
    fit("torch", "0@11=SIGTERM!", rows=193, code=75, more=commits)  # the last batch of an epoch has one row
    ended, reports = fit("torch", "", rows=193, more=commits)
    assert f"training goes on in epoch 1, from the commit in {tmp_path}" in ended.err
    assert [(report["wrong"], report["rows"]) for report in reports] == [({}, [193.0] * 3)] * 3


def test_a_job_of_local_sgd_ends_where_only_some_ranks_have_another_batch(tmp_path):
    """After the epoch, as it cannot commit in one, where ranks have weights of their own."""
    flags = ("-np", 3, "--min-np", 1, "--no-prefix-output", "--commit-dir", tmp_path, sys.executable)
    script = Path(__file__).with_name("local_sgd_script.py")
    ended = run(*flags, script, "asks", env=TORCH, warm=True)
    assert ended.code == 75, ended.err
    ended = run(*flags, script, "goes on", env=TORCH, warm=True)
    assert (ended.code, ended.out.split()) == (0, ["3"] * 3), ended.err
    assert "training goes on after epoch 1" in ended.err


def test_a_job_ends_before_its_first_step(tmp_path):
    """On TensorFlow, which creates metrics in it."""
    commits = ("--commit-dir", tmp_path)
    fit("tensorflow", "0@broadcast:0=SIGTERM!", "horovod", ranks=2, code=75, more=commits)
    _, reports = fit("tensorflow", "", "horovod", ranks=2, more=commits)
    assert [(report["wrong"], report["rows"]) for report in reports] == [({}, [203.0] * 3)] * 2


def test_the_first_commit_in_an_epoch_is_made_where_only_some_ranks_have_another_batch(tmp_path):
    _, reports = fit("torch", "", rows=193, more=("--commit-dir", tmp_path, "--commit-steps", 12))
    assert [(report["wrong"], report["rows"]) for report in reports] == [({}, [193.0] * 3)] * 3


def test_processes_that_a_rank_forks_are_ended_by_its_signals():
    script = (
        "import multiprocessing, time, choros; from choros.elastic.sampler import ElasticSampler; choros.init()\n"
        "sampler = ElasticSampler(range(8))\n"
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,), daemon=True)\n"
        "child.start(); child.terminate(); child.join(); print(-child.exitcode)"
    )
    ended = run("-np", 2, "--min-np", 1, "--no-prefix-output", sys.executable, "-c", script)
    assert (ended.code, ended.out.split()) == (0, [str(int(signal.SIGTERM))] * 2), ended.err


@pytest.mark.parametrize(
    ("framework", "api"),
    [
        ("jax", "horovod"),
        pytest.param("torch", "strategy", marks=pytest.mark.nightly),
        pytest.param("torch", "horovod", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", marks=pytest.mark.nightly),
    ],
)
def test_the_same_command_makes_the_validation_that_was_interrupted(framework, api, tmp_path):
    commits = ("--commit-dir", tmp_path)
    ended, reports = fit(framework, "1@validation:2=SIGTERM!", api, code=75, more=commits)  # in the second one
    assert reports == []
    ended, reports = fit(framework, "", api, ranks=2, more=commits)
    assert f"training goes on in epoch 2, from the commit in {tmp_path}" in ended.err
    assert len(reports) == 2
    for report in reports:
        assert (report["wrong"], report["rows"]) == ({}, [203.0] * 3)
        check_validation(report)


@pytest.mark.parametrize(
    ("framework", "api", "faults", "left"),
    [
        ("torch", "strategy", "0@5=SIGTERM,2@validation:2=SIGUSR1", [1, 3]),
        pytest.param("torch", "horovod", "0@12=SIGTERM,0@12=SIGUSR1,3@0=SIGUSR1", [1, 2], marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", "0@5=SIGTERM,2@16=SIGUSR1", [1, 3], marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", "0@5=SIGTERM", [1, 2, 3], marks=pytest.mark.nightly),
    ],
)
def test_a_rank_leaves_after_its_step(framework, api, faults, left):
    ended, reports = fit(framework, faults, api, ranks=4)
    assert sorted(report["rank"] for report in reports) == left, ended.err
    for report in reports:
        assert report["wrong"] == {}
        check_validation(report)
    assert "it leaves after this step, and the others go on" in ended.err
    assert ("killed by SIGUSR1" in ended.err) == ("0@12" in faults)  # the second signal


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["", "loader", "tf", "grain"])
def test_one_rank_goes_on_with_data_of_each_kind(data, tmp_path):
    given = {"more": ("--commit-dir", tmp_path), "least": 1, "data": data, "warm": data != "tf"}
    fit("torch", "0@5=SIGTERM!", ranks=2, code=75, **given)
    fit("torch", "0@2=SIGTERM", ranks=1, code=75, **given)  # the rank itself, as it is the last
    ended, (report,) = fit("torch", "", ranks=1, **given)
    assert (report["wrong"], report["rows"]) == ({}, [203.0] * 3), ended.err
    ended, _ = fit("torch", "", ranks=1, **given)
    assert "all epochs of this fit are in the commit in" in ended.err


@pytest.mark.nightly
def test_a_killed_job_goes_on_from_its_last_commit(tmp_path):
    commits = ("--commit-dir", tmp_path, "--commit-steps", 4)
    fit("torch", "0@22=SIGKILL!", code=-signal.SIGKILL, more=commits)
    ended, reports = fit("torch", "", ranks=2, more=commits)
    assert "training goes on in epoch 2" in ended.err
    assert [report["wrong"] for report in reports] == [{}, {}]


@pytest.mark.parametrize(("api", "ranks"), [("horovod", 1), ("strategy", 2)])
@pytest.mark.parametrize(
    ("faults", "code"), [("0@17=SIGTERM!", 75), pytest.param("0@commit:1", 69, marks=pytest.mark.nightly)]
)
def test_a_job_that_goes_on_ends_as_one_that_was_not_interrupted(api, ranks, faults, code, tmp_path):
    """In the middle of an epoch; or after an epoch, when its backup is newer than the last commit."""

    def job(name, faults, code=0):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        flags = ("-np", ranks, "--min-np", ranks, "--reset-limit", 0, "--commit-dir", directory / "commits")
        script = Path(__file__).with_name("goes_on_script.py")
        ended = run(*flags, sys.executable, script, api, faults, directory, env=TORCH, warm=True)
        assert ended.code == code, ended.err
        return ended.reports

    job("interrupted", faults, code)
    for report, expected in zip(job("interrupted", ""), job("whole", ""), strict=True):
        if code != 75:  # the row of the epoch that was made again
            assert report["log"].pop(2) == expected["log"][2]
        assert report.pop("trained") == pytest.approx(expected.pop("trained"), rel=1e-5)
        for name in ("loss", "statistics"):
            ours, theirs = report.pop(name), expected.pop(name)
            if code == 75 or ranks == 1:  # the last rank's commit lacks those of the lost one
                assert ours == pytest.approx(theirs, rel=1e-5)
        if ranks == 1:
            assert report == expected


@pytest.mark.parametrize(
    ("kind", "seed"), [pytest.param("permuted", 1, marks=pytest.mark.nightly), ("permuted", 2), ("loader", 2)]
)
def test_a_job_that_goes_on_with_data_in_another_order_says_so(kind, seed, tmp_path):
    """The generator of a ``DataLoader`` goes on from the commit, whatever its seed."""
    given = {"more": ("--commit-dir", tmp_path, "--commit-steps", 4), "least": 1, "ranks": 1}
    fit("torch", "0@6=SIGKILL!", code=-signal.SIGKILL, data=f"{kind}:1", **given)
    ended, (report,) = fit("torch", "", data=f"{kind}:{seed}", **given)
    differs = (kind, seed) == ("permuted", 2)
    assert "training goes on in epoch 1" in ended.err
    assert (report["wrong"] != {}) == ("the data are not in the order of the run" in ended.err) == differs


def test_a_rank_that_gets_the_signal_only_after_its_commit_ends_as_the_others(tmp_path):
    body = """
import atexit
if rank == 2:  # its signal waits until everything else has ended: before choros is imported, so as the last one
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    atexit.register(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM])
import choros
from choros.elastic.preemption import end_job, job_ends, watch_signals
from choros.parallel.objects import allgather_object
choros.init()
watch_signals(lambda: True)
allgather_object(None)
if rank == 1:
    ready()
while not job_ends():
    allgather_object(time.sleep(0.01))
end_job(lambda: None)
"""
    with Running("-np", 3, "--min-np", 2, sys.executable, rank_script(tmp_path / "late.py", body)) as job:
        job.wait_for(1, "ready")
        job.signal(signal.SIGTERM)
        ended = job.end()
        job.assert_nothing_left()
    assert (ended.code, "the ranks have ended" in ended.err) == (75, True), ended.err


#: All ranks watch for signals, then ``ready`` ranks say so; what they do until the job ends is added to it.
WATCHING = """
import atexit, choros
from choros.comm import END, global_process_set
from choros.elastic.preemption import end_job, job_ends, leave_if_asked, watch_signals
from choros.parallel.objects import allgather_object
choros.init()
watch_signals(lambda: True)
communicator = global_process_set.communicator
def ask(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
allgather_object(None)
"""
UNTIL_THE_END = """
while not job_ends():
    allgather_object(time.sleep(0.01))
    leave_if_asked(one_by_one=True)
end_job(lambda: print("committed", flush=True))
"""


def signalled(path, body, number=None):
    """The end of three ranks, of which chorosrun gets a signal once one is ready."""
    with Running("-np", 3, "--min-np", 2, "--reset-limit", 0, sys.executable, rank_script(path / "s.py", body)) as job:
        if number is not None:
            job.wait_for(1, "ready")
            job.signal(number)
        ended = job.end()
        job.assert_nothing_left()
    return ended


@pytest.mark.parametrize("also", ["before", "after"])
def test_a_rank_that_is_also_asked_alone_ends_with_all(also, tmp_path):
    body = f"""
if rank == 1:
    if {also == "before"}:
        ask()
    ready()
    while not communicator.notice & END:
        time.sleep(0.01)
    if {also == "after"}:
        ask()
"""
    ended = signalled(tmp_path, WATCHING + body + UNTIL_THE_END, signal.SIGTERM)
    assert (ended.code, ended.out.count("committed")) == (75, 3), ended.err


def test_a_rank_that_leaves_is_not_killed_on_its_way_out(tmp_path):
    body = """
if rank == 1:
    ask()
while communicator.size == 3:
    allgather_object(None)
    leave_if_asked(one_by_one=True)
"""
    ended = signalled(tmp_path, "import atexit\natexit.register(lambda: rank == 1 and ask())\n" + WATCHING + body)
    assert (ended.code, "killed by" in ended.err) == (0, False), ended.err


@pytest.mark.parametrize(("number", "call"), [("SIGTERM", "ranks that were asked to end"), ("SIGKILL", "")])
def test_a_rank_stays_if_too_few_would_be_left(number, call, tmp_path):
    """Rank 1 is asked to end, and before it leaves rank 2 gets a signal, too."""
    body = f"""
if rank == 1:
    ask()
agree = communicator.agree
def agreed(request, **how):
    if {call!r} in str(request):
        communicator.agree = agree
        ask(signal.{number})
    return agree(request, **how)
if rank == 2:
    communicator.agree = agreed
"""
    ended = signalled(tmp_path, WATCHING + body + UNTIL_THE_END)
    assert (ended.code, ended.out.count("committed")) == (75, 2), ended.err


def test_a_rank_that_the_signal_kills_before_it_can_commit_does_not_count(tmp_path):
    body = WATCHING.replace("watch_signals(", "rank == 2 or watch_signals(") + "if rank == 2:\n    ready()\n"
    ended = signalled(tmp_path, body + "    time.sleep(600)\n" + UNTIL_THE_END, signal.SIGTERM)
    assert (ended.code, ended.out.count("committed")) == (75, 2), ended.err
    assert "the ranks have ended" in ended.err


def test_a_rank_that_is_left_commits_if_the_signal_has_killed_too_many(tmp_path):
    body = """
if rank:
    ready()
    time.sleep(600)
try:
    allgather_object(None)
except choros.errors.PeerLostError:
    time.sleep(2)  # until chorosrun knows that there are too few
    print("committed", flush=True)
    raise
"""
    ended = signalled(tmp_path, WATCHING.replace("watch_signals(", "rank or watch_signals(") + body, signal.SIGUSR1)
    assert (ended.code, ended.out.count("committed")) == (69, 1), ended.err


def test_a_job_without_commits_ends_at_once():
    _, reports = fit("torch", "0@5=SIGTERM!", ranks=2, code=143)
    assert reports == []


def loop(faults, how, ranks, code=0, more=()):
    script = Path(__file__).with_name("torch_script.py")
    flags = ("-np", ranks, "--min-np", 2, "--reset-limit", 0, *more)
    ended = run(*flags, sys.executable, script, faults, how, env=TORCH, warm=True)
    assert ended.code == code, ended.err
    return ended.reports


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["plain", "run"])
def test_a_rank_leaves_a_loop_of_torch(how):
    reports = loop("0@5=SIGTERM", how, 3)
    assert [(report["size"], report["wrong"]) for report in reports] == [(2, {})] * 2


# Of nine: the job ends when it next commits, in step 5 or in step 8.
@pytest.mark.parametrize("step", [pytest.param(5, marks=pytest.mark.nightly), 6])
def test_a_loop_with_a_state_goes_on_after_the_last_commit(step, tmp_path):
    commits = ("--commit-dir", tmp_path)
    assert loop(f"1@{step}=SIGTERM!", "run", 3, 75, commits) == []
    assert [(report["size"], report["wrong"]) for report in loop("", "run", 2, 0, commits)] == [(2, {})] * 2


ASKED_BETWEEN_TWO_STEPS = """
import os, signal, sys, time, keras, numpy as np
import choros, choros.distribute as dist
from choros.comm import global_process_set

sys.path.insert(0, sys.argv[1])
from faults import process_above

class End(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):  # reads no weight, as most callbacks
        if batch == 3 and choros.rank() == 0:
            os.kill(process_above("chorosrun"), signal.SIGTERM)
            while not global_process_set.communicator.notice:
                time.sleep(0.01)

with dist.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, epochs=2, verbose=0, callbacks=[End()])
"""


def test_a_job_ends_between_two_steps_on_jax_where_the_model_lacks_its_weights(tmp_path):
    flags = ("-np", 2, "--min-np", 1, "--commit-dir", tmp_path)
    ended = run(
        *flags, sys.executable, "-c", ASKED_BETWEEN_TWO_STEPS, Path(__file__).parent, env={"KERAS_BACKEND": "jax"}
    )
    assert ended.code == 75, ended.err
    assert list(tmp_path.rglob("commit-*"))
