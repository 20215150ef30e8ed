"""What a rank does: a page of memory that its wrapper reads, also when the rank is stopped or in a call of C.

::

    collectives, steps ── a few numbers and a text ──► page ◄── wrapper ── RankProgress frames ──► chorosrun
                                                       (a file in memory that both have)

Writing takes a microsecond, and wakes no one. Without a wrapper, the page is this process's own memory.
"""

import mmap
import os
import struct
import time
from typing import final

from choros.observe.stragglers import RankProgress

#: The variable with the file descriptor of the page.
PROGRESS_FD = "CHOROS_PROGRESS_FD"
PAGE_BYTES = 512
#: steps, prompt steps; seconds in steps, of these waiting, loading. Then of the last collective: the time, the length
#: of its text, the number of ranks, and whether its data move.
_COUNTS = struct.Struct("<QQddd")
_LAST = struct.Struct("<dHI?")
_TEXT = _COUNTS.size + _LAST.size
_MOVES = _TEXT - 1
#: The last byte is the wrapper's: whether the whole job was asked to end.
_END = PAGE_BYTES - 1
#: A rank whose wait is a smaller share of a step is prompt: it was among the last.
_PROMPT = 0.05


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
        #: The seconds that this rank has waited for others since its last step.
        self.waited = 0.0
        self._loaded = 0.0
        self._step_began = 0.0
        self._left = 0.0

    @property
    def job_is_to_end(self) -> bool:
        """Whether chorosrun has asked all ranks to end, and not someone this one alone."""
        return bool(self.memory[_END])

    def begin_collective(self, text: bytes, ranks: int) -> None:
        """Notes that all of a number of ranks have called a collective."""
        text = text[: _END - _TEXT]
        self.memory[_TEXT : _TEXT + len(text)] = text
        _LAST.pack_into(self.memory, _COUNTS.size, time.time(), len(text), ranks, True)

    def end_collective(self) -> None:
        """Notes that its data have moved."""
        self.memory[_MOVES] = 0

    def note_step(self) -> None:
        """Notes that all ranks have come to reduce the gradients of a step."""
        now = time.perf_counter()
        if self._step_began:  # before the first step, ranks start, compile and load
            own = now - self._step_began
            steps, prompt_steps, seconds, waiting, loading = _COUNTS.unpack_from(self.memory)
            prompt_steps += self.waited < _PROMPT * own
            waiting, loading = waiting + min(self.waited, own), loading + min(self._loaded, own)
            _COUNTS.pack_into(self.memory, 0, steps + 1, prompt_steps, seconds + own, waiting, loading)
        self._step_began, self.waited, self._loaded = now, 0.0, 0.0

    def enter_train_step(self) -> None:
        """Notes the begin of a training step on a batch that was loaded since the end of the last one."""
        if self._left:
            self._loaded += time.perf_counter() - self._left

    def leave_train_step(self) -> None:
        """Notes its end."""
        self._left = time.perf_counter()


def read_page(memory: bytes | bytearray | mmap.mmap, rank: int = -1) -> RankProgress:
    """Returns what a rank has written."""
    steps, prompt_steps, seconds, waiting, loading = _COUNTS.unpack_from(memory)
    at, length, size, moves = _LAST.unpack_from(memory, _COUNTS.size)
    text, ago = bytes(memory[_TEXT : _TEXT + length]).decode("utf-8", "replace"), max(0.0, time.time() - at)
    return RankProgress(rank, steps, prompt_steps, seconds, waiting, loading, text, ago, size, moves)


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
