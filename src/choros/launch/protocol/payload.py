"""The payload: the function call of ``choros.run``, on its way to rank 0 through mpirun's standard input.

::

    chorosrun ── a line ──► mpirun ──► wrapper of rank 0 ── its bytes ──► standard input of the rank
        ▲                                   │
        └───────── Received(count) ◄────────┘   then the next line; the one after the last byte is empty

To another host, mpirun forwards only up to 4096 bytes at once: more is lost, or arrives in part again and again
(openpmix/prrte#2532 and #2580); and at times it begins late (openpmix/openpmix#4025). So one line is under way, with
a number and a checksum, and is sent again until it has arrived.
"""

import binascii
import os
from collections.abc import Callable
from contextlib import suppress
from typing import IO, final

from choros import durations
from choros.transport.loop import Loop

#: The bytes of a line's data: the line has less than 4096, which a pipe takes, and mpirun forwards, as a whole.
LINE_BYTES = 3000
_READ = 1 << 16
_DEADLINE = "payload"


def encode_line(payload: bytes, number: int) -> bytes:
    r"""Returns the line of this number, from 0 to ``line_count(payload) - 1``.

    >>> encode_line(b"call", 0)
    b'\n0 cc8e2f3e Y2FsbA==\n'
    """
    data = payload[number * LINE_BYTES : (number + 1) * LINE_BYTES]
    return b"\n%d %08x %s\n" % (number, binascii.crc32(data), binascii.b2a_base64(data, newline=False))


def line_count(payload: bytes) -> int:
    """Returns the number of lines, the empty one at the end included.

    >>> line_count(b""), line_count(bytes(LINE_BYTES)), line_count(bytes(LINE_BYTES + 1))
    (1, 2, 3)
    """
    return -(-len(payload) // LINE_BYTES) + 1


def decode_line(line: bytes) -> tuple[int, bytes] | None:
    r"""Returns the number and the data of a line without its ends; ``None`` if it is damaged.

    >>> decode_line(encode_line(b"call", 0).strip(b"\n"))
    (0, b'call')
    >>> decode_line(b"0 cc8e2f3e Y2Fs") is None
    True
    """
    try:
        number, checksum, encoded = line.split(b" ")
        data = binascii.a2b_base64(encoded)
        return (int(number), data) if binascii.crc32(data) == int(checksum, 16) else None
    except ValueError:
        return None


@final
class PayloadSender:
    """Writes ``payload`` to ``pipe``, mpirun's standard input. It stays open: at its end, mpirun may drop bytes."""

    def __init__(self, loop: Loop, pipe: int, payload: bytes) -> None:
        self._loop, self._pipe, self._payload = loop, pipe, payload
        self._received = 0

    def start(self) -> None:
        """Sends the first line."""
        os.set_blocking(self._pipe, False)
        self._send()

    def note_received(self, count: int) -> None:
        """Sends the next line, if the first ``count`` have arrived."""
        if count > self._received:
            self._received = count
            self._send()

    def _send(self) -> None:
        if self._received == line_count(self._payload):
            self._loop.cancel(_DEADLINE)
            return
        self._loop.set_deadline(_DEADLINE, durations.SEND_AGAIN, self._send)
        with suppress(BlockingIOError, BrokenPipeError):  # mpirun is late, or has ended
            os.write(self._pipe, encode_line(self._payload, self._received))


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
