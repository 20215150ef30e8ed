"""Connections to hosts that have fallen silent are shut down, within ``CHOROS_UNREACHABLE_SECONDS``.

::

    nothing to send        the kernel asks every second (TCP keepalive)    ┐ no answer, not even of its kernel: both
    data on the way        the kernel sends it again, ever more rarely     ┘ directions are shut down
    the receiver is full   its kernel answers that it is, each time, as long as its process reads nothing: no loss
    the link was down      the kernel may send again only a second after it is up: so before a host counts as silent, a
                           new connection asks it, at a port where nothing listens; a refusal is an answer, too

A process that computes or is stopped answers, as its kernel does. ``recv`` and ``send`` on a connection that was
shut down return at once; otherwise the kernel would send data again for a quarter of an hour. Linux only:
elsewhere keepalive alone finds out, where nothing is on the way.
"""

import contextlib
import errno
import socket
import struct
import sys
import threading
import time
import weakref

from choros import durations
from choros.settings import current

#: How often a host that seems to be silent is asked by a new connection.
_QUESTIONS = 2
#: Of ``struct tcp_info``: the state; how often data were sent again, and questions asked, without progress; the
#: milliseconds since data were last sent, since data came and since a confirmation came.
_INFO = struct.Struct("=B1xBB40xI4xII")
_ESTABLISHED = 1
_GIVEN_UP = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

_watched: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_silent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def watch_for_silence(end: socket.socket) -> None:
    """Shuts the TCP connection ``end`` down as soon as its other end has fallen silent."""
    global _thread
    seconds = unreachable_seconds()
    ask_often(end, max(1, round(seconds) - 1))
    if not sys.platform.startswith("linux"):
        return
    with _lock:
        _watched.add(end)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_look, args=(seconds,), name="choros: silent hosts", daemon=True)
            _thread.start()


def unreachable_seconds() -> float:
    """Returns the seconds after which a host that does not answer counts as lost."""
    return max(durations.LEAST_SILENCE, current().unreachable_seconds)


def ask_often(end: socket.socket, times: int = 100) -> None:
    """Makes the kernel ask the other end each second, if nothing is sent, and end the connection after ``times``."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", times)):
        if hasattr(socket, name):  # macOS lacks some of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def fell_silent(end: socket.socket, error: OSError) -> bool:
    """Returns whether ``end``, in which ``error`` occurred, was shut down here or given up by the kernel."""
    return end in _silent or error.errno in _GIVEN_UP


def _look(seconds: float) -> None:
    """Looks at all connections, as long as there are any."""
    limit = 1000 * (seconds - durations.REACTION - durations.SILENCE_LOOK)
    suspects: weakref.WeakSet[socket.socket] = weakref.WeakSet()
    while True:
        time.sleep(durations.SILENCE_LOOK)
        with _lock:
            ends = list(_watched)
            if not ends:
                global _thread
                _thread = None
                return
        answering: dict[str, bool] = {}
        for end in ends:
            with contextlib.suppress(OSError):  # closed meanwhile
                if not is_silent(end, limit):
                    suspects.discard(end)
                elif end not in suspects:  # it may have been asked just now
                    suspects.add(end)
                else:
                    host = end.getpeername()[0]
                    if host not in answering:
                        answering[host] = answers(end)
                    if not answering[host]:
                        _silent.add(end)
                        end.shutdown(socket.SHUT_RDWR)
            if end.fileno() < 0 or end in _silent:
                with _lock:
                    _watched.discard(end)
        del ends, end


def is_silent(end: socket.socket, limit: float) -> bool:
    """Returns whether ``end`` has waited for an answer for ``limit`` milliseconds; believe it the second time."""
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(info) < _INFO.size:
        return False
    state, resent, asked, since_sent, since_data, since_confirmation = _INFO.unpack(info)
    # Data that a full receiver refuses are sent again, too, and each time it confirms what it has had before. On
    # loopback, the answer to a question may come before Linux counts the question, which then stays counted.
    unanswered = asked > 1 or (resent > 0 and (since_sent < since_confirmation or not _has_route(end)))
    return bool(state == _ESTABLISHED and unanswered and min(since_data, since_confirmation) >= limit)


def answers(end: socket.socket) -> bool:
    """Returns whether the host at the other end of ``end`` answers a new connection."""
    host, own_port = end.getpeername()[0], end.getsockname()[1]
    for _ in range(_QUESTIONS):
        began = time.monotonic()
        with socket.socket(end.family, socket.SOCK_STREAM) as question:
            question.settimeout(durations.QUESTION)
            try:
                question.connect((host, own_port))
            except ConnectionRefusedError:
                return True
            except OSError:  # no answer, or its own link is down
                time.sleep(max(0.0, began + durations.QUESTION - time.monotonic()))
            else:
                return True
    return False


def _has_route(end: socket.socket) -> bool:
    """Whether this host could send to the other end: what its own link, being down, refuses does not count as sent."""
    try:
        with socket.socket(end.family, socket.SOCK_DGRAM) as probe:
            probe.connect(end.getpeername())  # sends nothing
    except OSError as error:
        return error.errno not in _GIVEN_UP
    return True
