import threading
from collections.abc import Iterator

import pytest

from choros.comm.work import WorkQueue


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    queue = WorkQueue()
    yield queue
    queue.close()


def test_works_run_one_after_the_other_in_the_order_of_the_calls(queue: WorkQueue) -> None:
    done: list[int] = []
    works = [queue.submit(done.append, i) for i in range(20)]
    works[-1].wait()
    assert done == list(range(20))
    assert all(work.done() for work in works)


def test_wait_returns_the_result_each_time(queue: WorkQueue) -> None:
    work = queue.submit(max, 2, 3)
    assert [work.wait(), work.wait()] == [3, 3]


def test_error_is_raised_only_by_wait(queue: WorkQueue) -> None:
    failing = queue.submit(int, "x")
    with queue.exclusive():
        pass
    assert queue.submit(int, "1").wait() == 1
    with pytest.raises(ValueError, match="'x'"):
        failing.wait()


def test_wait_ends_after_its_timeout_and_the_work_continues(queue: WorkQueue) -> None:
    gate = threading.Event()
    work = queue.submit(gate.wait)
    with pytest.raises(TimeoutError):
        work.wait(timeout=0)
    assert not work.done()
    gate.set()
    assert work.wait()


def test_exclusive_section_runs_after_earlier_works_and_before_later_ones(queue: WorkQueue) -> None:
    order: list[str] = []
    queue.submit(order.append, "before")
    with queue.exclusive():
        later = queue.submit(order.append, "later")
        order.append("exclusive")
    later.wait()
    assert order == ["before", "exclusive", "later"]


def test_a_work_may_enter_exclusive_sections(queue: WorkQueue) -> None:
    def nested() -> str:
        with queue.exclusive(), queue.exclusive():
            return "done"

    assert queue.submit(nested).wait() == "done"


def test_closed_queue_has_finished_its_works_and_accepts_new_ones(queue: WorkQueue) -> None:
    works = [queue.submit(str, i) for i in range(3)]
    queue.close()
    assert all(work.done() for work in works)
    assert queue.submit(str, 3).wait() == "3"
