import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from choros.comm.request import Request
from choros.comm.work import WorkQueue, page


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    queue = WorkQueue()
    yield queue
    queue.close()


def test_works_run_one_after_the_other_in_the_order_of_the_calls(queue: WorkQueue) -> None:
    done: list[int] = []
    works = [queue.submit("", done.append, i) for i in range(20)]
    works[-1].wait()
    assert done == list(range(20))
    assert all(work.done() for work in works)


def test_wait_returns_the_result_each_time(queue: WorkQueue) -> None:
    work = queue.submit("", max, 2, 3)
    assert [work.wait(), work.wait()] == [3, 3]


def test_error_is_raised_only_by_wait(queue: WorkQueue) -> None:
    failing = queue.submit("", int, "x")
    with queue.exclusive():
        pass
    assert queue.submit("", int, "1").wait() == 1
    with pytest.raises(ValueError, match="'x'"):
        failing.wait()


def test_wait_ends_after_its_timeout_and_the_work_continues(queue: WorkQueue) -> None:
    gate = threading.Event()
    work = queue.submit("", gate.wait)
    with pytest.raises(TimeoutError):
        work.wait(timeout=0)
    assert not work.done()
    gate.set()
    assert work.wait()


def test_exclusive_section_runs_after_earlier_works_and_before_later_ones(queue: WorkQueue) -> None:
    order: list[str] = []
    queue.submit("", order.append, "before")
    with queue.exclusive():
        later = queue.submit("", order.append, "later")
        order.append("exclusive")
    later.wait()
    assert order == ["before", "exclusive", "later"]


def test_a_work_may_enter_exclusive_sections(queue: WorkQueue) -> None:
    def nested() -> str:
        with queue.exclusive(), queue.exclusive():
            return "done"

    assert queue.submit("", nested).wait() == "done"


def test_closed_queue_has_finished_its_works_and_accepts_new_ones(queue: WorkQueue) -> None:
    works = [queue.submit("", str, i) for i in range(3)]
    queue.close()
    assert all(work.done() for work in works)
    assert queue.submit("", str, 3).wait() == "3"


def test_a_name_is_free_again_when_its_work_has_ended(queue: WorkQueue) -> None:
    for _ in range(3):
        assert queue.submit("a", str, 1).wait() == "1"


class Ranks:
    """The other ranks: they make the given plans when this rank's proposals differ from theirs."""

    def __init__(self, queue: WorkQueue, plans: list[list[str]]) -> None:
        self.queue = queue
        self.plans = plans
        self.turns: list[str] = []
        self.asked: list[str] = []
        #: A plan is made when so many threads have asked.
        self.planned_from = 0

    def exchange(self, request: Request, header: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        del header
        theirs = request.digest if not self.plans or self.queue.plan else Request("another").digest
        return [request.digest, theirs], [0, 0]

    def make_plan(self, request: Request) -> None:
        del request
        while len(self.asked) < self.planned_from:
            self.queue.section.give_up(self.queue.section.version, 0.01)
        self.queue.plan.extend(self.plans.pop(0))

    def collective(self, name: str, turn: str = "") -> None:
        with self.queue.exclusive():
            self.asked.append(name)
            self.queue.take_turn(name, Request(name), np.zeros(2, np.int64), self.exchange, self.make_plan)
            self.turns.append(turn or name)


def test_works_run_in_the_order_of_the_plan_and_later_in_the_same_order_without_one(queue: WorkQueue) -> None:
    ranks = Ranks(queue, plans=[["c", "b", "a"]])
    for _ in range(2):
        with queue.exclusive():  # the queue's thread begins when all are submitted
            works = [queue.submit(name, ranks.collective, name) for name in "abc"]
        for work in works:
            work.wait()
    assert ranks.turns == ["c", "b", "a", "c", "b", "a"]


def test_of_those_without_a_name_the_first_that_was_called_is_next_also_if_it_asks_last(queue: WorkQueue) -> None:
    ranks = Ranks(queue, plans=[["", "", "a"]])
    ranks.planned_from = 2
    with queue.exclusive():
        works = [queue.submit("a", ranks.collective, "a"), queue.submit("", ranks.collective, "", "first")]
    ranks.collective("", "second")
    for work in works:
        work.wait()
    assert ranks.turns == ["first", "second", "a"]


def test_a_thread_whose_collective_is_done_may_ask_for_another(
    queue: WorkQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, complete = threading.Event(), []

    @contextmanager
    def exchange() -> Iterator[None]:
        waits.set()
        yield
        complete.append(queue.asked_for()[2])

    monkeypatch.setattr(page, "exchange", exchange)
    assert queue.submit("", waits.wait).wait()
    assert complete == [False]


def test_a_section_that_is_given_up_is_left_with_the_same_depth(queue: WorkQueue) -> None:
    ranks = Ranks(queue, plans=[["b", "a"]])
    with queue.exclusive(), queue.exclusive():
        work = queue.submit("b", ranks.collective, "b")
        ranks.collective("a")
        assert work.done()
    assert ranks.turns == ["b", "a"]
    thread = threading.Thread(target=ranks.collective, args=("c",))
    thread.start()
    thread.join()
    assert ranks.turns == ["b", "a", "c"]
