"""Events: records of what the processes of a job do.

::

    comm  training  strategies  parameter servers          chorosrun
      │ emit(kind, name, details)                               │ emit
      ▼                                                         ▼
    listeners of a rank ── pipe ──► wrapper ── frames ──► listeners of chorosrun
    (``listeners.py``)                                    (the log, with CHOROS_LOG_LEVEL=debug)

Emitting code does not depend on listeners. Events to which no one listens are not created; code that runs in every
step looks at ``heard`` before it collects details. chorosrun always listens to ``REPORTS``, which are rare:
it needs them to know whether a job can still end.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import final

Detail = int | float | str | bool | tuple[int, ...] | list[int] | dict[str, float]


@final
class Kind(enum.StrEnum):
    """The kinds of events. ``…_BEGUN`` and ``…_DONE`` occur in pairs, from one thread; in a collective's pair is
    ``COLLECTIVE_MATCHED``: all ranks have called it. A step lasts from the agreement to reduce its gradients until
    all are reduced. A long wait emits ``WAITING`` several times, then ``WAITED``, named after the call.
    """

    STEP_BEGUN = "step begun"
    STEP_DONE = "step done"
    BUCKET_BEGUN = "bucket begun"
    BUCKET_DONE = "bucket done"
    EPOCH_BEGUN = "epoch begun"
    EPOCH_DONE = "epoch done"
    COLLECTIVE_BEGUN = "collective begun"
    COLLECTIVE_MATCHED = "collective matched"
    COLLECTIVE_DONE = "collective done"
    WAITING = "waiting"
    WAITED = "waited"
    RANK_STARTED = "rank started"
    RANK_JOINED = "rank joined"
    RANK_CRASHED = "rank crashed"
    SCRIPT_ENDED = "script ended"
    FINISHED = "finished"
    RANK_STOPPED = "rank stopped"
    RANK_ENDED = "rank ended"
    COMMIT = "commit"
    CHECKPOINT = "checkpoint"
    RECORDING = "recording"
    METRICS = "metrics"


#: The kinds that chorosrun needs from every rank: whom it waits for, that others have taken it in, that an exception
#: ends it, that its script has ended, but not yet its process, that it has left the job together with the others, the
#: file to which it records a timeline, and, once a second, how far ``fit`` is.
REPORTS = frozenset(
    {Kind.WAITING, Kind.WAITED, Kind.RANK_JOINED, Kind.RANK_CRASHED, Kind.SCRIPT_ENDED, Kind.FINISHED, Kind.RECORDING,
     Kind.METRICS}
)  # fmt: skip
#: The calls in which a rank joins the job, leaves it, and ends.
INIT, SHUTDOWN, LEAVING = "init()", "shutdown()", "MPI_Finalize()"


@dataclass(frozen=True)
class Event:
    """An event; its time is seconds since 1970 by its host's clock, its rank ``-1`` in a process such as chorosrun.

    >>> event = Event(Kind.COLLECTIVE_DONE, "loss", rank=1, time=0.0, details={"bytes": 8})
    >>> print(event)
    collective done: loss (bytes=8)
    >>> Event.from_json(event.to_json()) == event
    True
    """

    kind: Kind
    name: str = ""
    rank: int = -1
    time: float = 0.0
    details: Mapping[str, Detail] = field(default_factory=dict)

    def __str__(self) -> str:
        details = ", ".join(f"{key}={_brief(value)}" for key, value in self.details.items())
        return self.kind + (f": {self.name}" if self.name else "") + (f" ({details})" if details else "")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Event:
        """Returns the event that ``to_json`` wrote; a ``ValueError`` if the text is none."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "kind": Kind(fields["kind"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"{text!r:.100} is not an event: {error}") from error


Listener = Callable[[Event], None]

_listeners: tuple[tuple[Listener, frozenset[Kind]], ...] = ()
#: The kinds to which some listener listens.
heard: frozenset[Kind] = frozenset()
_rank = -1


def listen(listener: Listener, kinds: Collection[Kind] = tuple(Kind)) -> Callable[[], None]:
    """Calls ``listener`` with later events, in their thread: it must be quick, emit none and call no collective.

    >>> received = []
    >>> stop = listen(lambda event: received.append(str(event)))
    >>> emit(Kind.CHECKPOINT, "model.keras", step=3)
    >>> stop()
    >>> emit(Kind.CHECKPOINT, "model.keras", step=4)
    >>> received
    ['checkpoint: model.keras (step=3)']
    """
    registered = (listener, frozenset(kinds))
    _register((*_listeners, registered))
    return lambda: _register(tuple(each for each in _listeners if each is not registered))


def _register(listeners: tuple[tuple[Listener, frozenset[Kind]], ...]) -> None:
    global heard, _listeners
    _listeners = listeners
    heard = frozenset().union(*(kinds for _, kinds in listeners))


def identify(rank: int) -> None:
    """Sets the rank in this process's events."""
    global _rank
    _rank = rank


def emit(kind: Kind, name: str = "", **details: Detail) -> None:
    """Passes an event of this process to all listeners; ``name`` is that of its subject."""
    if kind in heard:
        publish(Event(kind, name, _rank, time.time(), details))


def publish(event: Event) -> None:
    """Passes an event that another process has emitted to all listeners."""
    for listener, kinds in _listeners:
        if event.kind in kinds:
            listener(event)


@contextmanager
def span(begun: Kind, done: Kind, name: str = "", **details: Detail) -> Iterator[None]:
    """Emits ``begun`` before the block and ``done``, with its ``seconds``, after it.

    >>> received = []
    >>> stop = listen(lambda event: received.append(event.kind.value))
    >>> with span(Kind.STEP_BEGUN, Kind.STEP_DONE):
    ...     pass
    >>> stop()
    >>> received
    ['step begun', 'step done']
    """
    if begun not in heard:
        yield
        return
    start = time.perf_counter()
    emit(begun, name, **details)
    try:
        yield
    finally:
        emit(done, name, **details, seconds=round(time.perf_counter() - start, 6))


def _brief(value: Detail) -> str:
    if isinstance(value, tuple | list):
        first_to_last = list(range(value[0], value[-1] + 1)) if value else []
        if len(value) > 2 and list(value) == first_to_last:
            return f"{value[0]}-{value[-1]}"
        return ",".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
