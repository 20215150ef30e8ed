"""Ranks that make different calls: all of them get an error, and can continue."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from choros.comm import Communicator, Reduction, Request, joining
from choros.errors import ConfigError, MismatchError

ONES = np.ones(4, np.float32)

#: The call of all ranks except the last, and that of the last.
DIFFERENT: dict[str, tuple[Callable[[Communicator], object], Callable[[Communicator], object]]] = {
    "collective": (lambda c: c.allreduce(ONES), lambda c: c.allgather(ONES)),
    "dtype": (lambda c: c.allreduce(ONES), lambda c: c.allreduce(ONES.astype(np.float64))),
    "shape": (lambda c: c.allreduce(ONES), lambda c: c.allreduce(ONES[:3])),
    "number of dimensions": (lambda c: c.allreduce(ONES), lambda c: c.allreduce(ONES[None])),
    "inner shape": (lambda c: c.allgather(ONES[None]), lambda c: c.allgather(ONES[None, :3])),
    "name": (lambda c: c.allreduce(ONES, name="a"), lambda c: c.allreduce(ONES, name="b")),
    "no name": (lambda c: c.barrier(name="a"), lambda c: c.barrier()),
    "operation": (lambda c: c.allreduce(ONES, Reduction.MIN), lambda c: c.allreduce(ONES, Reduction.MAX)),
    "root": (lambda c: c.broadcast(ONES, 0), lambda c: c.broadcast(ONES, 1)),
    "number of arrays": (lambda c: c.grouped_allreduce([ONES]), lambda c: c.grouped_allreduce([ONES, ONES])),
    "shape in a group": (
        lambda c: c.grouped_reducescatter([ONES, ONES]),
        lambda c: c.grouped_reducescatter([ONES, ONES[1:]]),
    ),
    "inner shape in a group": (
        lambda c: c.grouped_allgather([ONES, ONES[None]]),
        lambda c: c.grouped_allgather([ONES[1:], ONES[None, 1:]]),
    ),
    "members": (lambda c: c.split([0]), lambda c: c.split([1])),
}


def requests_in(error: MismatchError) -> dict[int, str]:
    """The request of each rank, as the text shows it."""
    lines = re.findall(r"^  ranks? ([\d, ]+): (.*)$", str(error), re.MULTILINE)
    return {int(rank): request for ranks, request in lines for rank in ranks.split(", ")}


def mismatch(communicator: Communicator, usual: Callable[[], object], other: Callable[[], object]) -> MismatchError:
    with pytest.raises(MismatchError) as raised:
        (other if communicator.rank == communicator.size - 1 else usual)()
    return raised.value


def case_every_difference_is_reported_on_all_ranks(communicator: Communicator) -> None:
    for what, (usual, other) in DIFFERENT.items():
        error = mismatch(communicator, lambda: usual(communicator), lambda: other(communicator))  # noqa: B023
        texts = communicator.allgather(np.frombuffer(str(error).encode(), np.uint8)).reshape(communicator.size, -1)
        assert (texts == texts[0]).all(), what
        assert requests_in(error).keys() == set(range(communicator.size)), what
        assert len(set(requests_in(error).values())) == 2, what


def case_the_message_shows_the_request_and_location_of_each_rank(communicator: Communicator) -> None:
    def usual() -> None:
        communicator.allreduce(ONES, Reduction.SUM, name="loss")

    def other() -> None:
        communicator.broadcast(3, 1)

    def at(function: Callable[[], None]) -> str:
        return f"{Path(__file__)}:{function.__code__.co_firstlineno + 1}"

    error = mismatch(communicator, usual, other)
    expected = dict.fromkeys(
        range(communicator.size), f"allreduce(name='loss', op=Sum, dtype=float32, shape=(4,)) at {at(usual)}"
    )
    expected[communicator.size - 1] = f"broadcast(root=1, dtype=int64, shape=()) at {at(other)}"
    assert requests_in(error) == expected


def case_ranks_that_disagree_on_the_order_fail_in_both_calls(communicator: Communicator) -> None:
    first, second = communicator.barrier, lambda: communicator.allreduce(ONES)
    mismatch(communicator, first, second)
    mismatch(communicator, second, first)


def case_error_on_one_rank_is_a_mismatch_on_the_others(communicator: Communicator) -> None:
    wrong_here = communicator.rank == communicator.size - 1
    array = np.ones(4, np.complex128 if wrong_here else np.float32)
    with pytest.raises(ConfigError if wrong_here else MismatchError, match="dtype complex128 cannot be communicated"):
        communicator.allreduce(array)


def case_mismatch_of_a_started_collective_is_raised_by_wait(communicator: Communicator) -> None:
    work = communicator.start("", communicator.allreduce, ONES[communicator.rank :], Reduction.SUM)
    assert communicator.allreduce(1, Reduction.SUM) == communicator.size
    with pytest.raises(MismatchError, match=r"shape=\(4,\)"):
        work.wait()


def case_ranks_that_have_joined_follow_what_they_know(communicator: Communicator) -> None:
    known = [Request("first"), Request("second")]
    followed = []

    def follow(request: Request, values: Sequence[int]) -> None:
        followed.append((request, values))

    if communicator.rank == 0:
        values = communicator.atomic(lambda: communicator.agree(known[1], value=7))
        assert values == [7] + [0] * (communicator.size - 1)
    joining.join(communicator, {each: functools.partial(follow, each) for each in known})
    expected = [(known[1], [7] + [0] * (communicator.size - 1))]
    assert followed == ([] if communicator.rank == 0 else expected)


def case_call_that_joined_ranks_do_not_know_is_a_mismatch_on_all(communicator: Communicator) -> None:
    def call() -> object:
        return (
            communicator.split([0])
            if communicator.rank == 0
            else joining.join(communicator, {Request("first"): lambda _: None})
        )

    with pytest.raises(MismatchError) as raised:
        call()
    requests = [request.partition(" at ")[0] for _, request in sorted(requests_in(raised.value).items())]
    assert requests == ["split(ranks=[0])"] + ["join()"] * (communicator.size - 1)
    assert communicator.allreduce(1, Reduction.SUM) == communicator.size


def case_communicator_works_after_a_mismatch(communicator: Communicator) -> None:
    mismatch(communicator, communicator.barrier, lambda: communicator.allreduce(ONES))
    assert communicator.allreduce(communicator.rank, Reduction.MAX) == communicator.size - 1
    assert communicator.allgather(ONES).shape == (4 * communicator.size,)
