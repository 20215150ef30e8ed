"""Collectives that ranks ask for in different orders, from several threads, or not at all because they have joined."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from choros.comm import Communicator, Reduction, Request, Work, joining
from choros.errors import ConfigError, MismatchError

SEED = 20
NAMES = [f"tensor {number}" for number in range(240)]
#: Of these numbers ranks ask for different shapes, and for a dtype that cannot be reduced.
MISSHAPEN, REFUSED = 17, 23


def start(communicator: Communicator, name: str, value: object) -> Work[np.ndarray]:
    return communicator.start(name, communicator.allreduce, value, Reduction.SUM, name=name)


def is_last(communicator: Communicator) -> bool:
    return communicator.rank == communicator.size - 1


def in_threads(functions: list[Callable[[], object]]) -> None:
    """Calls each function on a thread of its own; raises their first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def case_hundreds_from_three_threads_in_random_orders_with_errors(communicator: Communicator) -> None:
    order = random.Random(SEED + communicator.rank).sample(range(len(NAMES)), len(NAMES))

    def value_of(number: int) -> np.ndarray:
        if number % MISSHAPEN == 0:
            return np.ones(2 + is_last(communicator))
        return np.full(2, number, np.complex128 if number % REFUSED == 0 and is_last(communicator) else np.float64)

    def run(mine: list[int]) -> None:
        works = {number: start(communicator, NAMES[number], value_of(number)) for number in mine}
        for number, work in works.items():
            if number % MISSHAPEN == 0:
                with pytest.raises(
                    MismatchError, match=rf"name='{NAMES[number]}'.*shape=\(2,\).*matching_cases\.py:\d"
                ):
                    work.wait()
            elif number % REFUSED == 0:
                with pytest.raises(ConfigError if is_last(communicator) else MismatchError, match="complex128"):
                    work.wait()
            else:
                assert work.wait().tolist() == [number * communicator.size] * 2

    in_threads([lambda part=part: run(order[part::3]) for part in range(3)])
    assert communicator.allreduce(1, Reduction.SUM) == communicator.size


def case_blocking_calls_of_two_threads(communicator: Communicator) -> None:
    def run(thread: str) -> None:
        for number in range(20):
            assert communicator.allreduce(number, Reduction.MAX, name=f"{thread} {number}") == number

    in_threads([lambda: run("first"), lambda: run("second")])


def case_a_blocking_call_overtakes_one_that_was_started(communicator: Communicator) -> None:
    works = [start(communicator, "a", 1.0)] if is_last(communicator) else []
    assert communicator.allreduce(2.0, Reduction.SUM, name="b") == 2 * communicator.size
    works = works or [start(communicator, "a", 1.0)]
    assert works[0].wait() == communicator.size


def case_calls_without_a_name_keep_their_order_among_themselves(communicator: Communicator) -> None:
    works = [start(communicator, "a", 1.0)] if is_last(communicator) else []
    first = communicator.start("", communicator.allreduce, 10.0, Reduction.SUM)
    assert communicator.allreduce(20.0, Reduction.SUM) == 20 * communicator.size
    assert first.wait() == 10 * communicator.size
    works = works or [start(communicator, "a", 1.0)]
    assert works[0].wait() == communicator.size


def case_programs_with_calls_with_and_without_names(communicator: Communicator) -> None:
    """The order of those without a name is that of the program, whether a rank waits for them at once or later."""
    for program in range(40):
        own = random.Random(100 * program + communicator.rank)
        calls = [("", 10.0 * number) for number in range(1, 5)]
        for name in "abc":
            calls.insert(own.randint(0, len(calls)), (name, 1.0))
        works: list[tuple[float, Work[np.ndarray]]] = []
        for name, value in calls:
            if name:
                works.append((value, start(communicator, name, value)))
            elif own.random() < 0.5:
                works.append((value, communicator.start("", communicator.allreduce, value, Reduction.SUM)))
            else:
                assert communicator.allreduce(value, Reduction.SUM) == value * communicator.size
        for value, work in works:
            assert work.wait() == value * communicator.size


def case_a_name_that_is_under_way_is_refused(communicator: Communicator) -> None:
    works = []
    if is_last(communicator):
        works.append(start(communicator, "a", 1.0))
        with pytest.raises(ConfigError, match="'a' is already under way"):
            start(communicator, "a", 2.0)
        with pytest.raises(ConfigError, match="'a' is already under way"):
            in_threads([lambda: communicator.allreduce(2.0, name="a")])
    communicator.barrier()
    works = works or [start(communicator, "a", 1.0)]
    assert works[0].wait() == communicator.size
    assert start(communicator, "a", 3.0).wait() == 3 * communicator.size


def case_names_that_no_other_rank_asks_for_are_a_mismatch(communicator: Communicator) -> None:
    own = [start(communicator, f"{name} of rank {communicator.rank}", 1.0) for name in "ab"]
    common = start(communicator, "c", 1.0)
    for work in own:
        with pytest.raises(MismatchError, match="rank 0: allreduce"):
            work.wait()
    assert common.wait() == communicator.size


def case_process_sets_do_not_wait_for_each_other(communicator: Communicator) -> None:
    others = communicator.split(range(communicator.size))
    both = [communicator, others] if is_last(communicator) else [others, communicator]
    works = [start(each, "a", 1.0) for each in both]
    assert [work.wait() for work in works] == [communicator.size] * 2
    others.close()


# ── a rank that has joined ───────────────────────────────────────────────────────────────────────


def join(communicator: Communicator) -> None:
    joining.join(communicator, {})


def case_a_rank_joins_after_what_it_has_started(communicator: Communicator) -> None:
    names = "abc" if is_last(communicator) else "ca"
    works = {name: start(communicator, name, 1.0) for name in names}
    join(communicator)
    for name, work in works.items():
        assert work.wait() == (1 if name == "b" else communicator.size)


def agree(communicator: Communicator, request: Request, value: int = 0) -> list[int]:
    return communicator.atomic(lambda: communicator.agree(request, value=value))


def case_a_rank_that_has_joined_gives_zeros_to_every_collective(communicator: Communicator) -> None:
    size, rank = communicator.size, communicator.rank
    if rank > 0:
        for _ in range(2):  # The second time it knows them.
            others = sum(range(1, size))
            assert communicator.allreduce(rank, Reduction.SUM) == others
            assert communicator.allreduce(float(rank)) == others / size
            assert communicator.allreduce(np.full(3, rank, np.float16), Reduction.MIN).tolist() == [0] * 3
            grouped = communicator.grouped_allreduce([rank, [float(rank)]], Reduction.SUM, name="two")
            assert [each.tolist() for each in grouped] == [others, [others]]
            assert communicator.allgather(np.full((rank, 2), rank)).tolist() == [
                [each] * 2 for each in range(1, size) for _ in range(each)
            ]
            scattered = communicator.reducescatter(np.full(size + 1, rank), Reduction.SUM)
            assert scattered.tolist() == [others]
            both = communicator.grouped_reducescatter([np.full(size, rank), np.full((size, 1), rank)], Reduction.SUM)
            assert [each.tolist() for each in both] == [[others], [[others]]]
            counted, named = communicator.grouped_allgather([np.full(rank, rank), [float(rank)]], name="two")
            assert counted.tolist() == [each for each in range(1, size) for _ in range(each)]
            assert named.tolist() == list(range(1, size))
            assert communicator.allreduce(np.ones(2), Reduction.ADASUM).tolist() == [1.0, 1.0]
            rows, counts = communicator.alltoall(np.full(2 * size, rank))
            assert (rows.tolist(), counts.tolist()) == (
                [each for each in range(1, size) for _ in range(2)],
                [0] + [2] * (size - 1),
            )
            assert communicator.broadcast(rank, root=size - 1) == size - 1
            communicator.barrier()
    join(communicator)
    assert communicator.allreduce(1, Reduction.SUM) == size


def case_others_make_errors_and_ask_in_different_orders_while_a_rank_has_joined(communicator: Communicator) -> None:
    size, rank = communicator.size, communicator.rank
    if rank > 0:
        with pytest.raises(MismatchError, match=r"root=0.*: rank 0, which would send, has joined"):
            communicator.broadcast(rank, root=0)
        if size > 2:
            with pytest.raises(MismatchError, match="made different calls"):
                communicator.allreduce(np.ones(rank))
        order = [f"{number}" for number in range(8)][:: 1 if rank == 1 else -1]
        works = [start(communicator, name, float(name)) for name in order]
        assert [work.wait() for work in works] == [float(name) * (size - 1) for name in order]
    join(communicator)
    assert communicator.allreduce(1, Reduction.SUM) == size


def case_a_rank_that_has_joined_learns_what_a_layer_above_exchanges(communicator: Communicator) -> None:
    def request(name: str) -> Request:
        return Request("layer", name, explain=name.encode)

    def learn(message: bytes) -> joining.Participation:
        learned.append(message.decode())
        return {request(each): functools.partial(follow, each) for each in learned}

    def follow(name: str, values: Sequence[int]) -> None:
        followed.append((name, values))

    learned: list[str] = []
    followed = []
    if communicator.rank > 0:
        for name in ("a", "b", "a"):
            agree(communicator, request(name), communicator.rank)
    joining.join(communicator, {}, learn)
    expected = [(name, list(range(communicator.size))) for name in ("a", "b", "a")]
    assert (learned, followed) == (([], []) if communicator.rank else (["a", "b"], expected))
    # One that does not learn it is a mismatch.
    with pytest.raises(MismatchError, match=r"layer\(a\).*|join\(\)"):
        agree(communicator, request("a")) if communicator.rank else join(communicator)
    assert communicator.allreduce(1, Reduction.SUM) == communicator.size
