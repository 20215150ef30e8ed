"""Facts: objects that ranks have sent each other outside of openings (``context.opening``), such as a seed, and results
of openings. A new rank learns the same, those of openings that are over when it passes them by::

    rank 0, 1, 2     broadcast_object(draw())    fit(…)     evaluate(…)    fit(…)        facts: 17, a history, a loss
    a new rank       17                          history    loss           fit(…)        its script makes the same calls
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import cloudpickle

T = TypeVar("T")

#: Pickled objects, in the order of the calls.
Facts = Sequence[bytes]

#: As many bytes of objects are kept: for those that come later, a new rank has to do with its own.
_MOST = 256 << 20
_facts: list[bytes] = []
_learned: list[bytes] = []
_are_noted = True
_room = _MOST


def note_fact(pickled: bytes) -> None:
    """Notes an object that all ranks have now."""
    global _room
    if _are_noted:
        kept = pickled if len(pickled) <= _room else b""
        _room -= len(kept)
        _facts.append(kept)


def learned_fact(own: T) -> T:
    """Returns, in a new rank, what the others have sent each other in this call; ``own`` if it has not learned it."""
    pickled = _learned[len(_facts)] if _are_noted and len(_facts) < len(_learned) else b""
    note_fact(pickled)
    return cast(T, cloudpickle.loads(pickled)) if pickled else own


def facts() -> Facts:
    """Returns all facts so far: a view that grows."""
    return _facts


def learn_facts(facts: Facts) -> None:
    """Adds these to the facts that a new rank knows."""
    _learned.extend(facts)


@contextmanager
def without_facts() -> Iterator[None]:
    """A context in which what ranks send each other is no fact."""
    global _are_noted
    outer, _are_noted = _are_noted, False
    try:
        yield
    finally:
        _are_noted = outer
