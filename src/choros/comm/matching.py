"""Matching: which collective is next, when ranks ask for them in different orders.

Ranks that propose the same collective start it at once, after one control message. If they propose different ones, they
tell each other all that they wait for, until a name is common to all of them::

    rank 0                          rank 1
    proposes a                      proposes b              one control message: they differ
    offers a                        offers b                no name is common; rank 0's program still computes
    offers a, b                     offers b                b is common: the plan of both
    b                               b
    proposes a                      proposes a              the same again: one control message

A round in which no rank has anything new to tell is one small message. Rounds are a tenth of the time waited apart, at
most 10 ms. If no name is common, and every thread of every rank that could ask for more is waiting itself, they would
wait forever: this is a mismatch, which all ranks report.

Collectives without a name are matched in the order in which a rank calls them, Horovod's rule. Ranks that have joined
take part in whatever the others ask for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

__all__ = ["Offer", "matched"]


@dataclass(frozen=True)
class Offer:
    """What a rank waits for.

    Attributes:
        names: of collectives, in the order in which it asked for them; ``""`` is the first of those without a name.
        complete: whether it cannot ask for more before one of them is done.
        joined: whether it takes part in any.

    Example:
        >>> Offer.decode(Offer(("a", ""), complete=True).encode())
        Offer(names=('a', ''), complete=True, joined=False)
    """

    names: tuple[str, ...]
    complete: bool
    joined: bool = False

    def encode(self) -> bytes:
        """Returns the offer as a message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Offer:
        """Returns the offer of a message."""
        values = json.loads(message)
        return cls(tuple(values["names"]), values["complete"], values["joined"])


def matched(offers: Sequence[Offer]) -> list[str]:
    """Returns the names that all ranks wait for, in the order of the first rank that has not joined.

    Example:
        >>> matched([Offer(("a", "b", "c"), complete=False), Offer(("c", "b"), complete=True)])
        ['b', 'c']
        >>> matched([Offer((), complete=True, joined=True), Offer(("a",), complete=True)])
        ['a']
    """
    asking = [offer.names for offer in offers if not offer.joined]
    return [name for name in asking[0] if all(name in names for names in asking)] if asking else []
