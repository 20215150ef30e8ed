"""A process between two others, which hands on what they send and may add to it or change it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Relay:
    """Listens in the name of another process, and connects whoever comes with it.

    Attributes:
        address: where it listens.
        change: applied to what the listening process sends.
        to_connecting: the connection to the process that has connected last.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:{1}".format(*self._listening.getsockname())
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.to_connecting: socket.socket
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.to_connecting, _ = self._listening.accept()
                ends = self.to_connecting, self._connect()
                for source, sink, change in ((*ends, lambda data: data), (*ends[::-1], lambda data: self.change(data))):
                    threading.Thread(target=_forward, args=(source, sink, change), daemon=True).start()

    def _connect(self) -> socket.socket:
        if self._target.startswith("unix:"):
            end = socket.socket(socket.AF_UNIX)
            end.connect(self._target.removeprefix("unix:"))
            return end
        host, port = self._target.split(":")
        return socket.create_connection((host, int(port)))


def _forward(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(change(data))
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
    source.close()
