"""The handshake of a channel: each process proves to the other, before it reads anything else, that it has the key.

::

    worker 1 connects to ps 0                           ps 0 listens
      greeting: nonce, path, "worker 1", "ps 0" ─────────►
      ◄───────────────────────────────── greeting: nonce, path, "ps 0", "worker 1"
      ◄─────────────────────────────────── proof: HMAC(key, "listens" + transcript)
      proof: HMAC(key, "connects" + transcript) ─────────►
      ◄───────────────────────────────────────────────────────────────── welcome

A process that receives a wrong proof answers with zeros: so the other one knows, too, that their keys differ.

The transcript is the SHA-256 of both greetings, so a proof is valid for these roles, in this direction, on this
connection only. A process that hands on two others' messages can produce none of its own, nor speak for them later:

- *path* names the connection if both ends are on this host: the host, and both ends' addresses (Unix: the socket's
  path), which no two connections have at one time. Both ends report the same path: they are connected directly,
  only the kernel can write into the connection, and messages are sent as they are.
- Otherwise the connection leaves the host, or someone forwards it: every message is *sealed* with a key that both
  ends derive from the transcript (``Seal``). Who forwards it can read the messages, not change or add any.

After SIGMA and TLS 1.3's PSK handshake in their simplest form; see RFC 8446, section 4.2.11.
"""

import contextlib
import hashlib
import hmac
import itertools
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import TypeAlias, final

from choros.errors import EngineError
from choros.transport.address import is_loopback, this_host
from choros.transport.peers import plain_address
from choros.transport.secret import Key

_MAGIC = b"choros 2"
#: The number of bytes of a proof, of a tag of a section and of a digest.
DIGEST = 32
_GREETING = struct.Struct(f"!8s{DIGEST}s{DIGEST}sBB")
_WELCOME = b"\1"
_SAME_ADDRESSES = "all processes must have the same addresses."
#: The path of a connection that leaves the host.
_AWAY = bytes(DIGEST)


class Cut(EngineError):
    """The other end closed the connection before the handshake was complete; connecting again may succeed."""


#: What authenticates the sections of one direction of a connection: the HMAC of each, to be updated with its bytes.
Seal: TypeAlias = Iterator[hmac.HMAC]


def seal_with(key: bytes) -> Seal:
    """The HMACs of all sections, each by its number.

    >>> sender, receiver = seal_with(b"key"), seal_with(b"key")
    >>> tag, same = next(sender), next(receiver)
    >>> tag.update(b"section"), same.update(b"section")
    (None, None)
    >>> hmac.compare_digest(tag.digest(), same.digest())
    True
    """
    return (hmac.new(key, number.to_bytes(8), "sha256") for number in itertools.count())


#: A handshake's outcome: the proved name, and what seals what is sent, and received; ``None`` for direct connections.
Proved = tuple[str, Seal | None, Seal | None]


def offer_proof(end: socket.socket, key: Key, name: str, peer: str, seconds: float) -> Proved:
    """Proves to the listening process that this one has the key, and demands the same; changes the socket's time
    limit. ``Cut``: the other end has closed it; another ``EngineError``: another key or name, or no reply in time.
    """
    own = _End(end, key, name, seconds)
    mine = own.greeting(peer)
    own.send(mine)
    theirs, path, found, _ = own.receive_greeting()
    transcript = _digest(mine + theirs)
    proof = own.receive(DIGEST)
    if not hmac.compare_digest(proof, own.mac(b"listens", transcript)):
        with contextlib.suppress(EngineError):
            own.send(bytes(DIGEST))
        raise own.refused()
    if found != peer:
        raise EngineError(f"this process expected {peer} there and found {found} of the same job: {_SAME_ADDRESSES}")
    seals = own.seals(path, transcript, sends=b"connecting", receives=b"listening")
    own.send(own.mac(b"connects", transcript))
    own.receive(len(_WELCOME))
    return (peer, *seals)


def accept_proof(end: socket.socket, key: Key, name: str, seconds: float) -> Proved:
    """Like ``offer_proof``, in the listening process; the outcome has the name of the process that has connected."""
    own = _End(end, key, name, seconds)
    theirs, path, peer, expected = own.receive_greeting()
    mine = own.greeting(peer)
    transcript = _digest(theirs + mine)
    own.send(mine + own.mac(b"listens", transcript))
    if not hmac.compare_digest(own.receive(DIGEST), own.mac(b"connects", transcript)):
        raise own.refused()
    if expected != name:
        raise EngineError(f"{peer} expected {expected} here, and this is {name}: {_SAME_ADDRESSES}")
    seals = own.seals(path, transcript, sends=b"listening", receives=b"connecting")
    own.send(_WELCOME)
    return (peer, *seals)


@final
class _End:
    """This end of a connection during its handshake."""

    def __init__(self, end: socket.socket, key: Key, name: str, seconds: float) -> None:
        self._end = end
        self._name = name
        self._deadline = time.monotonic() + seconds
        try:
            self._path = path_of(end)
        except OSError as error:
            raise _closed() from error
        secret = key.secret_of(local=self._path != _AWAY)
        if secret is None:
            raise EngineError(
                "the connection comes from another host, and the processes of this job have only the key of this one: "
                "set CHOROS_SECRET, the same in all processes of the job."
            )
        self._key = key
        self._secret = secret

    def greeting(self, peer: str) -> bytes:
        names = self._name.encode(), peer.encode()
        return _GREETING.pack(_MAGIC, secrets.token_bytes(DIGEST), self._path, *map(len, names)) + b"".join(names)

    def seals(
        self, path: bytes, transcript: bytes, *, sends: bytes, receives: bytes
    ) -> tuple[Seal | None, Seal | None]:
        """What seals this connection, which has this ``path`` at its other end."""
        if self._path != _AWAY and self._path == path:
            return None, None
        if self._path != _AWAY and self._key.within_host:
            raise EngineError(
                "another process forwards this connection, which is not allowed between processes that authenticate "
                "each other by a file of this host: set CHOROS_SECRET, the same in all processes of the job."
            )
        return seal_with(self.mac(sends, transcript)), seal_with(self.mac(receives, transcript))

    def refused(self) -> EngineError:
        if self._key.within_host and self._path != _AWAY:
            return EngineError(
                "they must run as the same user with the same home directory, or have the same CHOROS_SECRET."
            )
        return EngineError("CHOROS_SECRET must be the same in all processes of the job.")

    def mac(self, label: bytes, transcript: bytes) -> bytes:
        return hmac.digest(self._secret, label + transcript, "sha256")

    def receive_greeting(self) -> tuple[bytes, bytes, str, str]:
        """Returns the greeting, and in it the path, the sender's name and that which it expects."""
        head = self.receive(_GREETING.size)
        magic, _, path, *lengths = _GREETING.unpack(head)
        stranger = EngineError("the process there is none of this version of choros: check the addresses.")
        if magic != _MAGIC:
            raise stranger
        names = [self.receive(length) for length in lengths]
        try:
            name, peer = map(bytes.decode, names)
        except UnicodeDecodeError as error:
            raise stranger from error
        return head + b"".join(names), path, name, peer

    def send(self, data: bytes) -> None:
        with self._in_time():
            self._end.sendall(data)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            with self._in_time():
                part = self._end.recv(size - len(data))
                if not part:
                    raise ConnectionResetError
            data += part
        return data

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        """A context that raises what ends it; the time limit is that of the whole handshake, however slow bytes are."""
        try:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._end.settimeout(left)
            yield
        except TimeoutError as error:
            raise EngineError("the handshake took too long.") from error
        except OSError as error:
            raise _closed() from error


def _closed() -> Cut:
    return Cut("the connection was closed during the handshake.")


def path_of(end: socket.socket) -> bytes:
    """Returns the digest that names the connection on this host, the same at both ends; zeros if it leaves the host."""
    own, other = end.getsockname(), end.getpeername()
    if end.family == socket.AF_UNIX:
        ends = [str(own or other)]
    else:
        addresses = [plain_address(each[0]) for each in (own, other)]
        # The address of packets from a host to itself is the one they are sent to; of loopback, there are many.
        if addresses[0] != addresses[1] and not all(map(is_loopback, addresses)):
            return _AWAY
        ends = sorted(f"{address} {each[1]}" for address, each in zip(addresses, (own, other), strict=True))
    return _digest("\n".join([this_host(), *ends]).encode())


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
