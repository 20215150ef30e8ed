from collections import OrderedDict, defaultdict, namedtuple

from choros.parallel.structure import leaves, map_structure

Pair = namedtuple("Pair", "first second")


def test_structures_keep_their_types() -> None:
    for structure in (
        1,
        None,
        [1, (2, None)],
        Pair(1, [2]),
        {"b": 1, "a": {"c": ()}},
        OrderedDict(b=1, a=2),
    ):
        mapped = map_structure(lambda number: number, structure)
        assert (mapped, type(mapped)) == (structure, type(structure))


def test_other_subclasses_of_dict_become_dicts() -> None:
    assert map_structure(str, defaultdict(list, a=1)) == {"a": "1"}


def test_leaves_are_in_the_order_of_the_structure() -> None:
    assert leaves({"b": [1, None, Pair(2, 3)], "a": (4,)}) == [1, 2, 3, 4]
