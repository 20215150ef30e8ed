"""Requests for the stacks of ranks: all wrappers are asked by one signal, and answer by frames.

::

    chorosrun ── SIGPROF ──► mpirun ──► every wrapper ── py-spy ──► its rank
        ▲                                     │
        └──────────── Stacks frames ──────────┘        the rank itself takes no part: it may be stopped
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import final

from choros.launch.protocol.frames import Stacks
from choros.transport.loop import Loop

__all__ = ["StackRequests"]

#: A wrapper needs less, also for several processes on a busy host.
_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class _StackRequest:
    ranks: frozenset[int]
    then: Callable[[Mapping[int, Stacks]], None]
    answers: dict[int, Stacks] = field(default_factory=dict)


@final
class StackRequests:
    """Collects the answers of each request.

    Args:
        loop: the loop in which they arrive.
        send: asks all wrappers; ``None``: this mpirun cannot.
    """

    def __init__(self, loop: Loop, send: Callable[[], None] | None) -> None:
        self._loop = loop
        self._send = send
        self._requests: list[_StackRequest] = []

    @property
    def pending(self) -> bool:
        """Whether a request has not been answered."""
        return bool(self._requests)

    def ask(self, ranks: Collection[int], then: Callable[[Mapping[int, Stacks]], None]) -> None:
        """Asks for the stacks of ``ranks``; calls ``then`` when all have answered, or with what there is in time."""
        request = _StackRequest(frozenset(ranks), then)
        if self._send is None or not ranks:
            then({})
            return
        self._requests.append(request)
        self._loop.set_deadline(f"stacks {id(request)}", _SECONDS, lambda: self._end(request))
        self._send()

    def note(self, answer: Stacks) -> None:
        """Receives an answer."""
        for request in list(self._requests):
            request.answers[answer.rank] = answer
            if request.ranks <= request.answers.keys():
                self._end(request)

    def _end(self, request: _StackRequest) -> None:
        self._loop.cancel(f"stacks {id(request)}")
        self._requests.remove(request)
        request.then(request.answers)
