"""Channels: authenticated connections between two processes of a job that send Python objects; and their listeners.

::

    connecting process                                  listening process (Listener)
      connect ───────────────────────────────────────────► accept
      ◄───────── handshake: before anything is unpickled ──────► (handshake.py)

      a message, in three sections:
      head      length of the body, number of arrays
      body      sizes of the arrays; pickle of the object without them
      arrays    array 0, array 1, …: their bytes in memory order
                each section is followed by its HMAC, unless the processes are connected directly on one host

The receiver verifies a section before it uses anything of it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import pickle
import socket
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import cloudpickle

from choros import durations
from choros.errors import EngineError
from choros.topology import split_address
from choros.transport.handshake import DIGEST, Cut, Seal, accept_proof, offer_proof
from choros.transport.peers import plain_address
from choros.transport.secret import Key
from choros.transport.silence import fell_silent, watch_for_silence

_HEAD = struct.Struct("!QI")
#: What is sealed is sent and received in chunks of this size: one end computes the HMAC while the other one does, too.
_CHUNK = 1 << 20
#: Parts up to this size are copied into one write.
_SMALL = 1 << 16
#: How many connections may be in their handshake. One more, and the oldest is closed: a process of the job needs
#: milliseconds for its proof, and connects again if it was closed.
_UNPROVEN = 64
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WARNINGS = 10

_log = logging.getLogger(__name__)

#: The connections of this process's channels.
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Otherwise the connections of a process that is killed would live on in those that it has forked."""
    for end in list(_open):
        end.close()


os.register_at_fork(after_in_child=_close_in_child)


class ChannelClosed(EngineError):
    """A channel's peer has closed it or ended, or, if ``silent``, its host does not answer any more."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


@final
class Channel:
    """Sends objects to one process, whose name ``peer`` is proved, and receives them, perhaps in another thread."""

    def __init__(self, end: socket.socket, peer: str, sends: Seal | None, receives: Seal | None) -> None:
        self.peer = peer
        self._end = end
        self._sends, self._receives = sends, receives
        self._sending = threading.Lock()
        _open.add(end)
        # Closed when no thread can wait for it any more; close() only ends the connection.
        closing = weakref.finalize(self, end.close)
        closing.atexit = False  # at its exit, a process may still wait for others, and serve them
        end.settimeout(None)
        if end.family in (socket.AF_INET, socket.AF_INET6):
            # A message is several writes, none of which may wait until the peer has acknowledged the previous one.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_for_silence(end)

    @property
    def own_address(self) -> str:
        """The IP address of this end."""
        return plain_address(self._end.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """The IP address of the other end."""
        return plain_address(self._end.getpeername()[0])

    def fileno(self) -> int:
        """The descriptor: readable when at least a part of a message has arrived, or when the peer is gone."""
        return self._end.fileno()

    def send(self, message: Any) -> None:
        """Sends a picklable object; arrays in it are sent without a copy. ``ChannelClosed``: the peer is gone."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        sizes = struct.pack(f"!{len(raw)}Q", *(part.nbytes for part in raw))
        sections: list[list[Any]] = [[_HEAD.pack(len(body), len(raw))], [sizes, body], raw]
        try:
            with self._sending:
                for write in _joined(self._sealed(sections)):
                    self._end.sendall(write)
        except OSError as error:
            raise self._closed(error) from error

    def receive(self) -> Any:
        """Returns the next object, its arrays writable; ``ChannelClosed``: peer gone, or its message was changed."""
        try:
            (head,) = self._read(_HEAD.size)
            length, count = _HEAD.unpack(head)
            sizes, body = self._read(8 * count, length)
            buffers = self._read(*struct.unpack(f"!{count}Q", sizes)) if count else []
        except OSError as error:
            raise self._closed(error) from error
        return pickle.loads(body, buffers=buffers)  # noqa: S301  (the peer is authenticated)

    def close(self) -> None:
        """Closes the connection; the peer, and a thread that waits in ``receive``, get ``ChannelClosed``."""
        with contextlib.suppress(OSError):  # already closed
            self._end.shutdown(socket.SHUT_RDWR)

    def _sealed(self, sections: Sequence[Sequence[Any]]) -> Any:
        """Yields the parts of the sections, with the tag after each section."""
        for section in filter(None, sections):
            tag = self._sends and next(self._sends)
            for part in section:
                for chunk in _chunks(part) if tag else (memoryview(part),):
                    yield chunk
                    if tag:
                        tag.update(chunk)
            if tag:
                yield memoryview(tag.digest())

    def _read(self, *sizes: int) -> list[bytearray]:
        """Returns the parts of the next section, of these sizes, once it is verified."""
        tag = self._receives and next(self._receives)
        parts = [bytearray(size) for size in sizes]
        for part in parts:
            for chunk in _chunks(part) if tag else (memoryview(part),):
                self._fill(chunk)
                if tag:
                    tag.update(chunk)
        if tag:
            self._fill(memoryview(received := bytearray(DIGEST)))
            if not hmac.compare_digest(received, tag.digest()):
                self.close()
                raise ChannelClosed(
                    f"the connection to {self.peer} is closed: a message was changed on the way. Someone on the "
                    "network interferes."
                )
        return parts

    def _fill(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            received = self._end.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("end of the connection")
            filled += received

    def _closed(self, error: OSError) -> ChannelClosed:
        silent = fell_silent(self._end, error)
        reason = "cannot be reached any more" if silent else "has ended"
        return ChannelClosed(f"the connection to {self.peer} is closed: it {reason}.", silent=silent)


class Unreachable(EngineError):
    """No process listens at an address."""


def connect(
    address: str, key: Key, name: str, peer: str, seconds: float, pause: float = durations.ENDPOINT_LOOK
) -> Channel:
    """Returns a channel to ``peer``, which proves its name, at ``address`` (``host:port`` or ``unix:PATH``); it tries
    again after each ``pause``. ``Unreachable``: no process listens there in time, or it closes each connection;
    another ``EngineError``: the peer has another key or name.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            end = connect_within(address, max(0.0, deadline - time.monotonic()), pause)
        except OSError as error:
            raise Unreachable(
                f"{peer} could not be reached at {address} within {seconds:g} s ({error}): check that it was "
                "started, that the address is valid on every host, and that no firewall blocks it. "
                "CHOROS_START_TIMEOUT sets the time limit."
            ) from error
        try:
            return Channel(end, *offer_proof(end, key, name, peer, durations.PROOF))
        except EngineError as error:
            end.close()
            if not isinstance(error, Cut):
                raise not_authenticated(peer, error) from error
            # A listener with too many connections that prove nothing closes the oldest of them.
            if time.monotonic() + durations.CONNECT_AGAIN > deadline:
                raise Unreachable(str(not_authenticated(peer, error))) from error
            time.sleep(durations.CONNECT_AGAIN)


def not_authenticated(peer: str, error: EngineError) -> EngineError:
    """Returns the error of a handshake with ``peer`` that has failed."""
    return EngineError(f"{peer} and this process could not authenticate each other: {error}")


def _chunks(part: Any) -> Sequence[memoryview]:
    view = memoryview(part)
    return [view[start : start + _CHUNK] for start in range(0, len(view), _CHUNK)]


def _joined(parts: Any) -> Any:
    """Yields the parts, neighbouring small ones as one: each is a write."""
    small = bytearray()
    for part in parts:
        if len(part) <= _SMALL:
            small += part
            continue
        if small:
            yield small
            small = bytearray()
        yield part
    if small:
        yield small


_UNIX = "unix:"


def connect_within(address: str, seconds: float, pause: float = durations.ENDPOINT_LOOK) -> socket.socket:
    """Connects to ``address``; tries again after each ``pause``, or after ``seconds`` raises the last ``OSError``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connected = _connect(address, max(durations.ENDPOINT_LOOK, deadline - time.monotonic()))
        except OSError:
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
        else:
            connected.settimeout(None)
            return connected


def _connect(address: str, seconds: float) -> socket.socket:
    if not address.startswith(_UNIX):
        connected = socket.create_connection(split_address(address), timeout=seconds)
        # The kernel may choose a free port of this host as the source: the socket is then connected to itself.
        if connected.getsockname() == connected.getpeername():
            connected.close()
            raise ConnectionRefusedError("no process listens there")
        return connected
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(seconds)
        connected.connect(address.removeprefix(_UNIX))
    except OSError:
        connected.close()
        raise
    return connected


_BACKLOG = 128


def _listen_at(address: str) -> socket.socket:
    """Returns a socket that listens only at ``address``, or raises an ``OSError``."""
    if address.startswith(_UNIX):
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address.removeprefix(_UNIX))
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
        return listening
    host, port = split_address(address)
    return listen(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)


def listen(ip: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens at the address ``ip`` of this host, at all of its addresses if that is empty."""
    dual = not ip and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in ip else socket.AF_INET
    return socket.create_server((ip, port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


@final
class Listener:
    """Listens only at ``address``, and calls ``serve`` with the channel and the first message in a thread for each.
    Who proves nothing is closed after ``durations.PROOF``, earlier if they are many; ``refusal``: why the last was.
    """

    def __init__(
        self, address: str | socket.socket, key: Key, name: str, serve: Callable[[Channel, Any], None]
    ) -> None:
        self._key = key
        self._name = name
        self._serve = serve
        self.refusal = ""
        self._refusals = 0
        self._closed = False
        self._lock = threading.Lock()
        self._unproven: list[socket.socket] = []
        try:
            self._listening = _listen_at(address) if isinstance(address, str) else address
        except OSError as error:
            raise EngineError(
                f"this process cannot listen at {address}, its address in the cluster ({error}): another process may "
                "be listening there, or the address does not belong to this host."
            ) from error
        self._accepting = self._start(self._accept)

    def close(self) -> None:
        """Stops accepting connections; those already accepted stay open. Others may listen at the address then."""
        self._closed = True
        with contextlib.suppress(OSError):  # macOS: the socket is not connected
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listening.close()
        self._accepting.join(durations.LISTENER_PAUSE)  # macOS may leave it where it is

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._listening.accept()
            except OSError as error:
                if self._closed:
                    return
                if error.errno in _FULL:
                    self._close_oldest()
                    time.sleep(durations.LISTENER_PAUSE)
                continue  # the process that connected has given up already
            with self._lock:
                self._unproven.append(end)
                full = len(self._unproven) > _UNPROVEN
            if full:
                self._close_oldest()
            peer = f"the process at {address[0]}" if address else "a process of this host"
            try:
                self._start(self._greet, end, peer)
            except RuntimeError:  # too many threads or processes: who has connected may try again
                self._end_unproven(end)
                self._close_oldest()
                time.sleep(durations.LISTENER_PAUSE)

    def _close_oldest(self) -> None:
        with self._lock, contextlib.suppress(OSError, IndexError):
            self._unproven.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _end_unproven(self, end: socket.socket) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._unproven.remove(end)
        end.close()

    def _greet(self, end: socket.socket, peer: str) -> None:
        try:
            proved = accept_proof(end, self._key, self._name, durations.PROOF)
        except EngineError as error:
            end.close()
            refusal = str(not_authenticated(peer, error))
            if isinstance(error, Cut):  # it has ended, or will connect again
                _log.info("%s", refusal)
            else:
                self._warn(refusal)
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._unproven.remove(end)
        channel = Channel(end, *proved)
        try:
            first = channel.receive()
        except ChannelClosed:
            return  # It ended before it had identified itself.
        self._serve(channel, first)

    def _warn(self, refusal: str) -> None:
        """Warns of a refusal; of many, which anybody may cause, only of the first ones."""
        with self._lock:
            self._refusals += 1
            self.refusal = refusal
            if self._refusals <= _WARNINGS:  # with the lock: the last one says so last
                further = " Further ones are not logged." if self._refusals == _WARNINGS else ""
                _log.warning("%s%s", refusal, further)

    @staticmethod
    def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread


@dataclass(frozen=True)
class Failure:
    """An error to be raised in another process, by cloudpickle, since its class may be defined in the user's script."""

    pickled: bytes
    text: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Pickles ``error``, its traceback a note; an ``EngineError`` with its text if it cannot be pickled."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        try:
            pickle.loads(cloudpickle.dumps(error))  # noqa: S301
        except Exception:  # noqa: BLE001  (an exception's own methods may raise anything)
            error = EngineError(f"{type(error).__name__}: {error}")
        note = f"Raised on {socket.gethostname()}:\n{trace}"
        error.add_note(note)
        return cls(cloudpickle.dumps(error), f"{type(error).__name__}: {error}\n{note}")

    def error(self) -> BaseException:
        """Returns the error to raise; an ``EngineError`` with its text, if what it needs is not installed here."""
        try:
            error: BaseException = pickle.loads(self.pickled)  # noqa: S301  (from an authenticated process)
        except Exception:  # noqa: BLE001  (what unpickling an object of any class raises)
            return EngineError(self.text)
        return error
