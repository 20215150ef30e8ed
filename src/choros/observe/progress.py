"""What a rank does: a page of memory that its wrapper reads, also when the rank is stopped or in a call of C.

::

    collectives, steps ── a few numbers and a text ──► page ◄── wrapper ── RankProgress frames ──► chorosrun
                                                       (a file in memory that both have)

Writing takes a microsecond, and wakes no one. Without a wrapper, the page is this process's own memory.
"""

import contextlib
import math
import mmap
import operator
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

#: What the seconds of steps are spent on, in words; ``computing`` is what is left.
PARTS = {
    "computing": "computing",
    "loading": "loading data",
    "waiting": "waiting for other ranks",
    "exchanging": "exchanging gradients",
    "committing": "committing",
    "recovering": "recovering from lost ranks",
}
#: The numbers of ``RankProgress`` that a job's record has over time; the others it has as they are last.
SERIES = ("steps", "examples", "seconds", *list(PARTS)[1:], "pausing", "memory")
#: The format of a job's record.
RECORD_FORMAT = 1


@dataclass(frozen=True)
class RankProgress:
    """What a rank has done since it joined, which chorosrun gets once a second, before its stacks and before its end.
    ``seconds``: in steps, each from one meeting of all ranks to the next one; of these ``waiting`` for other ranks,
    ``loading`` data, ``exchanging`` values, ``committing``, ``recovering`` from the loss of others; ``pausing``:
    between epochs, in no step. ``squares``, ``products``: sums over the steps, of the number of examples squared, and
    times the seconds of computing and loading. ``prompt_steps``: it hardly waited, being among the last. ``began``:
    when it made its first step, in seconds since 1970; ``memory``: its bytes. ``histogram``: how many steps took a
    time, see ``bucket_of``. ``collectives``: by name, how many there were, and the bytes of arrays that this rank has
    given to them. ``last``: the last collective, which all of ``last_size`` ranks had called so many seconds ``ago``;
    ``moves``: its data still move.
    """

    rank: int
    steps: int = 0
    prompt_steps: int = 0
    seconds: float = 0.0
    waiting: float = 0.0
    loading: float = 0.0
    exchanging: float = 0.0
    committing: float = 0.0
    recovering: float = 0.0
    pausing: float = 0.0
    examples: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    began: float = 0.0
    last: str = ""
    ago: float = 0.0
    last_size: int = 0
    moves: bool = False
    memory: int = 0
    histogram: Sequence[int] = ()
    collectives: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def computing(self) -> float:
        """The seconds in steps that are nothing else."""
        spent = self.waiting + self.loading + self.exchanging + self.committing + self.recovering
        return max(0.0, self.seconds - spent)


#: The variable with the file descriptor of the page.
PROGRESS_FD = "CHOROS_PROGRESS_FD"
PAGE_BYTES = 1280
#: The numbers of a ``RankProgress`` from ``steps`` to ``began``. Then of the last collective: the time, the length
#: of its text, the number of ranks, and whether its data move.
_COUNTS = struct.Struct("<QQ11d")
_SECONDS = [each.name for each in fields(RankProgress) if each.type is float and each.name != "ago"]
_PAUSING = _SECONDS.index("pausing")
_LAST = struct.Struct("<dHI?")
_TEXT = _COUNTS.size + _LAST.size
_MOVES = _TEXT - 1
#: The number of places in a histogram of steps: ``bucket_of``.
BUCKETS = 64
_HISTOGRAM = struct.Struct(f"<{BUCKETS}I")
_TIMES = PAGE_BYTES - 1 - _HISTOGRAM.size
_COUNT = struct.Struct("<I")
#: A row of the table of collectives: the name, how many there were, and their bytes. The last row has all other names.
_CALLS = struct.Struct("<16sQQ")
_ROWS = 8
_TABLE = _TIMES - _ROWS * _CALLS.size
#: The last byte is the wrapper's: whether the whole job was asked to end.
_END = PAGE_BYTES - 1
#: A rank whose wait is a smaller share of a step is prompt: it was among the last.
_PROMPT = 0.05


def bucket_of(seconds: float) -> int:
    """The place in a histogram of a step that took so long: three double the time, from 50 µs on.

    >>> bucket_of(1e-6), bucket_of(100e-6), bucket_of(1.0), bucket_of(1e9)
    (0, 3, 42, 63)
    """
    return min(BUCKETS - 1, max(0, int(3 * math.log2(seconds / 50e-6)))) if seconds > 0 else 0


def limit_of(place: int) -> float:
    """The seconds that steps at this place in a histogram took at most; the last place has longer ones, too.

    >>> [round(limit_of(place) * 1e6) for place in (0, 2, 3)]
    [63, 100, 126]
    """
    return float(50e-6 * 2 ** ((place + 1) / 3))


@final
class Page:
    """Writes the page.

    >>> page = Page(bytearray(PAGE_BYTES))
    >>> page.begin_collective(b"allreduce(name='loss')", 2)
    >>> read_page(page.memory).last
    "allreduce(name='loss')"
    """

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self.memory = memory
        #: The seconds that this rank has spent since its last step.
        self.waited = self.loaded = self.exchanged = self.committed = self.recovered = self.paused = 0.0
        self._step_began = 0.0
        self._loads = self._compiles = False
        self._began_exchange: float | None = None
        self._pause: contextlib.ExitStack | None = None
        #: By the name of a collective: its row, how many there were, and their bytes.
        self._calls: dict[str, list[int]] = {}

    @property
    def job_is_to_end(self) -> bool:
        """Whether chorosrun has asked all ranks to end, and not someone this one alone."""
        return bool(self.memory[_END])

    def begin_collective(self, text: bytes, ranks: int, *, hidden: bool = False) -> None:
        """Notes that all of a number of ranks have called a collective, maybe ``hidden`` behind what computes."""
        text = text[: _TABLE - _TEXT]
        self.memory[_TEXT : _TEXT + len(text)] = text
        _LAST.pack_into(self.memory, _COUNTS.size, time.time(), len(text), ranks, True)
        # A clock that stands still while this rank waits for others.
        self._began_exchange = None if hidden else time.perf_counter() - self.waited

    def end_collective(self, collective: str, sent: int) -> None:
        """Notes that its data have moved, and counts it; this rank has given so many bytes of arrays to it."""
        self.memory[_MOVES] = 0
        began, self._began_exchange = self._began_exchange, None  # another thread's collective may end now, too
        if began is not None:
            self.exchanged += max(0.0, time.perf_counter() - self.waited - began)
        name = collective if collective in self._calls or len(self._calls) < _ROWS - 1 else "others"
        calls = self._calls.setdefault(name, [len(self._calls), 0, 0])
        calls[1] += 1
        calls[2] += sent
        _CALLS.pack_into(self.memory, _TABLE + calls[0] * _CALLS.size, name.encode(), calls[1], calls[2])

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """A context that waits for a collective of another thread."""
        began = time.perf_counter() - self.waited
        try:
            yield
        finally:
            self.exchanged += max(0.0, time.perf_counter() - self.waited - began)

    @contextmanager
    def counted_as(self, name: str) -> Iterator[None]:
        """A context whose seconds are ``committed``, ``recovered`` or ``paused``, but for those of such a one in it."""
        began, kept, counted = time.perf_counter(), (self.loaded, self.exchanged, self.waited), self._counted()
        try:
            yield
        finally:
            self.loaded, self.exchanged, self.waited = kept
            own = time.perf_counter() - began - (self._counted() - counted)
            setattr(self, name, getattr(self, name) + own)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context that waits for a batch, maybe in another one."""
        if self._loads:
            yield
            return
        self._loads, began = True, time.perf_counter()
        try:
            yield
        finally:
            self.loaded += time.perf_counter() - began
            self._loads = False

    def note_compiling(self) -> None:
        """Notes that the next step is compiled first: the time until it is made is no step's, but a pause."""
        self._compiles = True

    def begin_pause(self) -> None:
        """Notes that an epoch has ended."""
        if self._pause is None:
            self._pause = contextlib.ExitStack()
            self._pause.enter_context(self.counted_as("paused"))

    def end_pause(self) -> None:
        """Notes that the next epoch begins."""
        if self._pause is not None:
            self._pause.close()
            self._pause = None

    def _counted(self) -> float:
        return self.committed + self.recovered + self.paused

    def note_step(self, examples: int = 0) -> None:
        """Notes that all ranks have come to reduce the gradients of a step, this one with so many examples."""
        if self._pause is not None:
            self.end_pause()
        now = time.perf_counter()
        steps, prompt_steps, *counts, began = _COUNTS.unpack_from(self.memory)
        if self._step_began and self._compiles:
            counts[_PAUSING] += now - self._step_began
        elif self._step_began:  # before the first step, ranks start, compile and load
            own = left = max(0.0, now - self._step_began - self.paused)
            spent = []
            for each in (self.loaded, self.exchanged, self.committed, self.recovered, self.waited):
                spent.append(min(max(0.0, each), left))
                left -= spent[-1]
            *spent, waited = spent
            new = (own, waited, *spent, self.paused, examples, examples * examples, examples * (left + spent[0]))
            counts = [*map(operator.add, counts, new)]
            place = _TIMES + _COUNT.size * bucket_of(own)
            _COUNT.pack_into(self.memory, place, _COUNT.unpack_from(self.memory, place)[0] + 1)
            steps, prompt_steps = steps + 1, prompt_steps + (waited < _PROMPT * own)
        _COUNTS.pack_into(self.memory, 0, steps, prompt_steps, *counts, began or time.time())
        self._step_began, self._compiles = now, False
        if self._began_exchange is not None:
            self._began_exchange += self.waited
        self.waited = self.loaded = self.exchanged = self.committed = self.recovered = self.paused = 0.0


def read_page(memory: bytes | bytearray | mmap.mmap, rank: int = -1) -> RankProgress:
    """Returns what a rank has written."""
    at, length, size, moves = _LAST.unpack_from(memory, _COUNTS.size)
    text, ago = bytes(memory[_TEXT : _TEXT + length]).decode("utf-8", "replace"), max(0.0, time.time() - at)
    steps, prompt_steps, *seconds = _COUNTS.unpack_from(memory)
    counts: dict[str, Any] = dict(zip(_SECONDS, seconds, strict=True))
    done = RankProgress(rank, steps, prompt_steps, **counts, last=text, ago=ago, last_size=size, moves=moves)
    rows = _CALLS.iter_unpack(memory[_TABLE:_TIMES])
    calls = {name.rstrip(b"\0").decode("utf-8", "replace"): (number, sent) for name, number, sent in rows if number}
    return replace(done, histogram=_HISTOGRAM.unpack_from(memory, _TIMES) if steps else (), collectives=calls)


#: The page of this process.
page = Page(bytearray(PAGE_BYTES))


def note_end(descriptor: int) -> None:
    """Notes, in the wrapper, that all ranks are asked to end."""
    os.pwrite(descriptor, b"\x01", _END)


def open_page() -> None:
    """Writes the page that the wrapper reads from now on, if there is one."""
    text = os.environ.pop(PROGRESS_FD, None)  # in a child process, the number denotes another file
    if text is not None:
        descriptor = int(text)
        page.memory = mmap.mmap(descriptor, PAGE_BYTES)
        os.close(descriptor)
