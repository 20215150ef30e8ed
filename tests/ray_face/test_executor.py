"""``RayExecutor`` on a real Ray: its ranks, their objects, errors and output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from ray_face import training
from ray_face.conftest import pid_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture
def executor(cluster):
    from choros.ray import RayExecutor

    made = []

    def make(room_within=60, **given):  # Ray may still free what the last test had
        made.append(RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=room_within), **given))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


class Counter:
    def __init__(self, first, step=1):
        self.value, self.step = first, step

    def next(self):
        self.value += self.step
        return self.value


def rank_plus(number, add=0):
    import choros

    choros.init()
    return choros.rank() + number + add


def environment():
    import choros

    choros.init()
    return os.environ["OWN"], os.environ["MORE"], os.environ["OMP_NUM_THREADS"], choros.local_size()


def test_calls(executor) -> None:
    import ray

    job = executor(num_workers=2, env_vars={"OWN": "a"})
    job.start(executable_cls=Counter, executable_args=[5], executable_kwargs={"step": 2}, extra_env_vars={"MORE": 7})
    assert job.run(rank_plus, args=[10], kwargs={"add": 100}) == [110, 111]
    assert job.execute(lambda counter: counter.next()) == [7, 7]
    assert job.execute_single(lambda counter: counter.next()) == 9
    assert job.execute(lambda counter: counter.value) == [9, 7]
    assert ray.get(job.run_remote(rank_plus, args=[1])) == [1, 2]
    assert job.run(environment) == [("a", "7", "1", 2)] * 2
    assert ray.available_resources().get("CPU", 0) == 0
    job.shutdown()
    deadline = time.monotonic() + 20
    while ray.available_resources().get("CPU", 0) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_ranks_log(executor) -> None:
    def train():
        import choros
        from choros.ray import log

        choros.init()
        log({"rank": choros.rank()})

    job, found = executor(num_hosts=1, num_workers_per_host=2), []
    job.start()
    job.run(train, callbacks=[found.append])
    assert sorted(each["rank"] for each in found) == [0, 1]


def fails_on_rank_1():
    import choros

    choros.init()
    if choros.rank() == 1:
        raise ValueError("a mistake")
    while True:
        time.sleep(1)


def test_an_error(executor) -> None:
    from choros.errors import LaunchError, WorkerFailed

    job = executor(num_workers=2)
    job.start()
    with pytest.raises(WorkerFailed, match=r"rank 1 .*ValueError") as caught:
        job.run(fails_on_rank_1)
    assert caught.value.rank == 1
    assert caught.value.traceback.splitlines()[1].endswith("in fails_on_rank_1")
    with pytest.raises(LaunchError, match="start"):
        job.run(rank_plus, args=[1])
    job.shutdown()
    job.start()
    assert job.run(rank_plus, args=[1]) == [1, 2]


def test_an_actor_is_killed(executor) -> None:
    from choros.errors import WorkerFailed

    job = executor(num_workers=2)
    job.start()
    actor = next(each for each in job.adapter._registry._actors if each.rank == 1)
    threading.Timer(1.0, os.kill, (pid_of(actor), signal.SIGKILL)).start()
    with pytest.raises(WorkerFailed, match="rank 1") as caught:
        job.run(time.sleep, args=[60])
    assert "its actor has ended" in caught.value.traceback


def test_no_room(executor) -> None:
    with pytest.raises(TimeoutError, match="no room"):
        executor(num_workers=9, room_within=5).start()


def test_arguments(executor) -> None:
    with pytest.raises(ValueError, match="Both `min_workers` and `num_workers`"):
        executor(num_workers=1, min_workers=1)
    with pytest.raises(ValueError, match="`max_workers` provided without"):
        executor(max_workers=1)
    with pytest.raises(ValueError, match="use_gpu is False"):
        executor(num_workers=1, gpus_per_worker=1)
    with pytest.raises(ValueError, match="either `num_workers` or `num_hosts`"):
        executor()


def test_output_reaches_the_driver(cluster) -> None:
    script = f"""
        import time
        import ray
        ray.init(address={cluster.address!r})
        from choros.ray import RayExecutor
        job = RayExecutor(RayExecutor.create_settings(), num_workers=2)
        job.start()
        job.run(lambda: print("hello from a rank"))
        time.sleep(10)  # in which Ray forwards it
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}] hello from a rank" in done.stdout + done.stderr


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax"])
def test_keras(executor, framework) -> None:
    job = executor(num_workers=2, env_vars={"KERAS_BACKEND": framework})
    job.start()
    for rank, report in enumerate(job.run(training.count_rows, args=[2])):
        assert (report["rank"], report["size"], report["backend"]) == (rank, 2, framework)
        assert report["counts"] == [2.0]


def test_ray_tune(cluster) -> None:
    """A trial is one job, in its own placement group."""
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    from ray import tune

    def trial(config):  # Ray's workers cannot import this module
        from choros.ray import RayExecutor

        def rank_plus(number):
            import choros

            choros.init()
            return choros.rank() + number

        job = RayExecutor(RayExecutor.create_settings(), num_workers=2, cpus_per_worker=0.5)
        job.start()
        tune.report({"sum": sum(job.run(rank_plus, args=[config["number"]]))})
        job.shutdown()

    resources = tune.PlacementGroupFactory([{"CPU": 0.1}, {"CPU": 0.5}, {"CPU": 0.5}])
    tuner = tune.Tuner(tune.with_resources(trial, resources), param_space={"number": tune.grid_search([1, 20])})
    assert sorted(result.metrics["sum"] for result in tuner.fit()) == [3, 41]


def test_ranks_and_choros_load_nothing_of_ray() -> None:
    for module in ("choros", "choros.ray", "choros.ray.rank"):
        check = f"import {module}, sys; assert 'ray' not in sys.modules"
        subprocess.run([sys.executable, "-c", check], check=True, timeout=300)
