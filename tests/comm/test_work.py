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


def test_wait_gives_the_result_as_often_as_it_is_asked(queue: WorkQueue) -> None:
    work = queue.submit(max, 2, 3)
    assert [work.wait(), work.wait()] == [3, 3]


def test_error_is_for_whoever_waits_and_for_nobody_else(queue: WorkQueue) -> None:
    failing = queue.submit(int, "x")
    with queue.exclusive():
        pass
    assert queue.submit(int, "1").wait() == 1
    with pytest.raises(ValueError, match="'x'"):
        failing.wait()


def test_wait_gives_up_after_its_timeout_and_the_work_goes_on(queue: WorkQueue) -> None:
    gate = threading.Event()
    work = queue.submit(gate.wait)
    with pytest.raises(TimeoutError):
        work.wait(timeout=0)
    assert not work.done()
    gate.set()
    assert work.wait()


def test_a_turn_comes_after_what_was_submitted_and_holds_up_what_comes_later(queue: WorkQueue) -> None:
    order: list[str] = []
    queue.submit(order.append, "before")
    with queue.exclusive():
        later = queue.submit(order.append, "later")
        order.append("turn")
    later.wait()
    assert order == ["before", "turn", "later"]


def test_a_work_may_take_turns_of_its_own(queue: WorkQueue) -> None:
    def nested() -> str:
        with queue.exclusive(), queue.exclusive():
            return "done"

    assert queue.submit(nested).wait() == "done"


def test_closed_queue_has_finished_its_works_and_takes_new_ones(queue: WorkQueue) -> None:
    works = [queue.submit(str, i) for i in range(3)]
    queue.close()
    assert all(work.done() for work in works)
    assert queue.submit(str, 3).wait() == "3"
