"""The parts of the coordinator that need no processes; run by ``test_coordinator.py``."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from choros.distribute.cluster_resolver import SimpleClusterResolver
from choros.distribute.coordinator import ClusterCoordinator
from choros.errors import ClosureCancelled, ConfigError, EngineError
from choros.parameter_server import ParameterServerStrategy
from choros.parameter_server.optimizer import RemoteOptimizer, clip
from choros.parameter_server.queue import Clocks, Closure, ClosureQueue

KEY = b"0123456789abcdef"


def closure(name: str = "") -> Closure:
    return Closure(name, name.encode(), b"", {})


@pytest.mark.parametrize("bound", [0, 1, 3])
def case_no_worker_starts_a_step_beyond_the_staleness_bound(bound):
    """Threads act as workers; one is slow, and one is lost half-way."""
    queue = ClosureQueue(Clocks(bound), 30)
    names = ("fast", "slow", "lost")
    done, ahead = dict.fromkeys(names, 0), []
    begun = threading.Barrier(len(names))

    def work(name):
        steps = 0
        taken = queue.take(name)
        begun.wait()
        while taken is not None:
            if name == "lost" and steps == 3:
                del done[name]
                queue.lost(name, taken)
                queue.remove_worker(name)
                return
            time.sleep(0.01 if name == "slow" else 0)
            steps += 1
            done[name] = steps
            queue.done(name, taken, None)
            taken = queue.take(name)
            if taken is not None:
                ahead.append(steps - min(done.copy().values()))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for _ in names:
        queue.add_worker()
    for _ in range(60):
        queue.put(closure(), limit=100)
    for thread in threads:
        thread.start()
    queue.wait()
    queue.close()
    for thread in threads:
        thread.join(10)
    assert done["fast"] + done["slow"] == 60 - 3
    assert 0 < max(ahead) <= bound or bound == 0 == max(ahead)
    assert done["fast"] - done["slow"] <= bound + 1


def case_an_idle_worker_does_not_block_others():
    clocks = Clocks(1)
    clocks.start("idle")
    clocks.finish("idle")
    clocks.mark_idle("idle")
    for _ in range(10):
        assert clocks.may_start("busy")
        clocks.start("busy")
        clocks.finish("busy")
    clocks.start("idle")  # starts one step behind, not ten
    assert clocks.may_start("busy")


def case_the_closure_of_a_lost_worker_is_run_next():
    queue = ClosureQueue(Clocks(None), 30)
    queue.add_worker()
    first, second = closure("first"), closure("second")
    queue.put(first, 9)
    queue.put(second, 9)
    assert queue.take("a") is first
    queue.lost("a", first)
    assert queue.take("b") is first
    queue.done("b", first, 1)
    assert queue.take("b") is second
    queue.done("b", second, 2)
    assert queue.idle
    assert [each.result.result() for each in (first, second)] == [1, 2]


def case_a_closure_during_which_three_workers_were_lost_is_an_error():
    queue = ClosureQueue(Clocks(None), 30)
    fatal, other = closure("fatal"), closure("other")
    queue.put(fatal, 9)
    queue.put(other, 9)
    for worker in ("worker 0", "worker 1", "worker 0"):
        queue.add_worker()
        assert queue.take(worker) is fatal
        queue.lost(worker, fatal)
        queue.remove_worker(worker)
    with pytest.raises(EngineError, match=r"fatal is not run again.* worker 0, worker 1, worker 0"):
        queue.wait()
    with pytest.raises(EngineError, match="fatal"):
        fatal.result.result()
    with pytest.raises(ClosureCancelled):
        other.result.result()
    assert queue.idle


def case_an_error_cancels_waiting_closures_and_is_raised_once():
    queue = ClosureQueue(Clocks(None), 30)
    queue.add_worker()
    first, second = closure(), closure()
    queue.put(first, 9)
    queue.put(second, 9)
    queue.failed("a", queue.take("a"), KeyError("x"))
    with pytest.raises(KeyError):
        queue.put(closure(), 9)
    assert queue.idle
    with pytest.raises(KeyError):
        first.result.result()
    with pytest.raises(ClosureCancelled):
        second.result.result()


def case_what_is_lost_at_the_end_is_said():
    done, waits, failed = (ClosureQueue(Clocks(None), 30) for _ in range(3))
    assert done.close() == ""
    waits.put(closure(), 9)
    assert waits.close().startswith("scheduled functions that have not been run: 1; ")
    failed.put(closure(), 9)
    failed.failed("a", failed.take("a"), KeyError("x"))
    assert "KeyError('x')" in failed.close()


def case_a_job_without_workers_is_an_error_after_the_time_limit():
    queue = ClosureQueue(Clocks(None), 0.01)
    queue.put(closure(), 9)
    with pytest.raises(EngineError, match="no worker"):
        queue.wait()
    one = closure()
    queue.put(one, 9)
    with pytest.raises(EngineError, match="no worker"):
        queue.result_of(one.result)


def case_clipping_is_the_same_as_in_keras():
    gradients = [np.array([3.0, -4.0]), np.array([0.3])]
    np.testing.assert_allclose(clip(gradients, clipnorm=1.0)[0], [0.6, -0.8])
    np.testing.assert_allclose(clip(gradients, clipnorm=1.0)[1], [0.3])
    np.testing.assert_allclose(clip(gradients, clipvalue=2.0)[0], [2, -2])
    norm = np.sqrt(25.09)
    np.testing.assert_allclose(clip(gradients, global_clipnorm=1.0)[1], [0.3 / norm])
    assert clip(gradients) == gradients


def case_accumulated_gradients_are_means():
    optimizer = RemoteOptimizer(None, 0, None, is_chief=False)
    one = np.array([1.0])
    assert optimizer.accumulated([one], 2) is None
    assert optimizer.accumulated([one * 3], 2) == [2.0]
    assert optimizer.accumulated([one], 2) is None
    assert one == 1.0


@pytest.mark.parametrize(
    ("cluster", "task", "text"),
    [
        ({"worker": ["127.0.0.1:1"]}, ("worker", 0), "has no ps"),
        ({"chief": ["127.0.0.1:1"]}, ("chief", 0), "has no worker and no ps"),
        ({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}, ("worker", 1), "worker 1, but"),
        ({"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}, ("boss", 0), "a 'boss'"),
        ({"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}, ("worker", 0), "CHOROS_SECRET is not set"),
    ],
)
def case_an_invalid_cluster_is_an_error(cluster, task, text):
    resolver = SimpleClusterResolver(cluster, task_type=task[0], task_id=task[1])
    with pytest.raises(ConfigError, match=text):
        ParameterServerStrategy(resolver)


def case_invalid_arguments_are_errors():
    with pytest.raises(ConfigError, match="max_staleness=-1"):
        ParameterServerStrategy(max_staleness=-1)
    with pytest.raises(ConfigError, match="takes a ParameterServerStrategy, not a str"):
        ClusterCoordinator("strategy")
