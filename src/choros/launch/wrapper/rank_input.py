"""What rank 0 reads, as its wrapper passes it on: the payload, which arrives in lines (``protocol/payload.py``)."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO, final

from choros.launch.protocol.payload import decode_line
from choros.transport.loop import Loop

_READ = 1 << 16


@final
class RankInput:
    """Writes the payload, whose lines arrive at ``source``, to ``pipe``, and closes it after the last one; calls
    ``received`` with the number of lines that the rank has got.
    """

    def __init__(self, loop: Loop, source: int, pipe: IO[bytes], received: Callable[[int], None]) -> None:
        self._loop, self._source, self._pipe, self._received = loop, source, pipe, received
        self._count = 0
        self._part = b""
        self._data: bytes | None = None
        loop.on_readable(source, self._read)

    def _read(self) -> None:
        arrived = os.read(self._source, _READ)
        if not arrived:  # mpirun has ended
            self._loop.forget(self._source)
        *lines, self._part = (self._part + arrived).split(b"\n")
        for number, data in filter(None, map(decode_line, lines)):
            if number == self._count and self._data is None:
                self._data = data
                self._loop.on_writable(self._pipe, self._write)
            elif number < self._count:  # again
                self._received(self._count)

    def _write(self) -> None:
        """Writes a whole line, for which a writable pipe has room."""
        self._loop.forget(self._pipe)
        with suppress(BrokenPipeError):  # the rank has ended
            os.write(self._pipe.fileno(), self._data or b"")
        if not self._data:
            self._pipe.close()
        self._data = None
        self._count += 1
        self._received(self._count)
