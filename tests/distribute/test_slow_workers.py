"""Workers on which functions take longer than on the others: no processes."""

from __future__ import annotations

from choros.parameter_server.queue import WorkerTimes


def sentence(seconds: dict[str, float], runs: int = 11) -> str:
    times = WorkerTimes()
    for worker, each in seconds.items():
        times.note(worker, "step", 60.0, 0.0)  # compiles
        for _ in range(runs - 1):
            times.note(worker, "step", each, each / 4)
    return times.sentence()


def test_a_slow_worker_is_named() -> None:
    assert sentence({"worker 0": 0.1, "worker 1": 0.1, "worker 2": 0.16}) == (
        "worker 2 is slower than the others: step takes 0.16 s there (25 % waiting for servers), 0.1 s elsewhere"
    )


def test_workers_that_are_not_slow() -> None:
    assert not sentence({"worker 0": 0.1, "worker 1": 0.14})
    assert not sentence({"worker 0": 0.1})
    assert not sentence({"worker 0": 0.1, "worker 1": 1.0}, runs=10)  # too few runs


def test_functions_are_compared_with_themselves() -> None:
    times = WorkerTimes()
    for _ in range(20):
        times.note("worker 0", "train", 0.1, 0.0)
        times.note("worker 1", "evaluate", 1.0, 0.0)
    assert not times.sentence()


def test_each_slow_worker_is_named_once() -> None:
    times = WorkerTimes()
    for _ in range(20):
        for worker, seconds in (("worker 0", 0.1), ("worker 1", 0.1), ("worker 2", 0.1), ("worker 3", 1.0)):
            times.note(worker, "step", seconds, 0.0)
    assert times.sentence().startswith("worker 3")
    assert not times.sentence()
