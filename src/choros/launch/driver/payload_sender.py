"""The sender of a payload, to mpirun: see ``protocol/payload.py``."""

import os
from contextlib import suppress
from typing import final

from choros import durations
from choros.launch.protocol.payload import encode_line, line_count
from choros.transport.loop import Loop

_DEADLINE = "payload"


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
