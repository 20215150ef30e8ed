from typing import Any

import numpy as np
import pytest

from choros.errors import ConfigError
from choros.parallel.objects import allgather_object, broadcast_object
from parallel.threads import on_threads


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.value == other.value

    __hash__ = None


OBJECTS: dict[str, Any] = {
    "none": None,
    "empty": b"",
    "tree": {"epoch": 3, "losses": [0.5, float("inf")], "names": {"a", "b"}},
    "instance": Plain(4),
    "class": Plain,
    "large": bytes(range(256)) * (1 << 14),
}


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS)
def test_broadcast_sends_the_object_of_the_root_to_all_ranks(obj: Any, root: int) -> None:
    def rank_main(process_set: Any) -> Any:
        return broadcast_object(obj if process_set.rank() == root else "not this", root, process_set=process_set)

    assert on_threads(3, rank_main) == [obj] * 3


def test_broadcast_returns_the_object_itself_on_the_root_and_copies_elsewhere() -> None:
    objects = [[0], [1], [2]]
    results = on_threads(
        3, lambda process_set: broadcast_object(objects[process_set.rank()], 1, process_set=process_set)
    )
    assert results == [[1], [1], [1]]
    assert [result is objects[1] for result in results] == [False, True, False]


def test_functions_and_closures_can_be_sent() -> None:
    def rank_main(process_set: Any) -> int:
        rank = process_set.rank()
        functions = allgather_object(lambda x: x + rank, process_set=process_set)
        return [function(10) for function in functions]

    assert on_threads(3, rank_main) == [[10, 11, 12]] * 3


def test_allgather_of_objects_of_different_sizes() -> None:
    def rank_main(process_set: Any) -> list[Any]:
        return allgather_object("x" * 10 ** (2 * process_set.rank()), process_set=process_set)

    assert on_threads(3, rank_main) == [["x", "x" * 100, "x" * 10000]] * 3


def test_received_arrays_are_writable() -> None:
    def rank_main(process_set: Any) -> list[float]:
        array = broadcast_object(np.zeros(2), process_set=process_set)
        array += process_set.rank()
        return array.tolist()

    assert on_threads(2, rank_main) == [[0, 0], [1, 1]]


def test_root_outside_of_the_process_set_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"root_rank=2 is not one of the participating ranks \[0, 1\]"):
        on_threads(2, lambda process_set: broadcast_object(1, 2, process_set=process_set))
