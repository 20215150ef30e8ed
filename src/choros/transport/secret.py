"""The key with which the processes of a job authenticate each other.

::

    CHOROS_SECRET       set by chorosrun, or by the user on every host: a job anywhere
    a file of the user  that only this user can read: a job on one host

Objects that ranks exchange may be signed: what is unpickled comes from a rank of the job. MPI's connections are those
of the job's own processes and need none; Gloo's prove nothing about who is at their other end::

    rank 0                                      rank 1
    object ─ pickle ─► data, HMAC ────────────► HMAC of the same? ─ unpickle ─► object
                 of the key of the communicator, the number of the collective, the rank of the sender, and the data
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from choros.errors import ConfigError, EngineError
from choros.ownership import READABLE, problem_with
from choros.settings import VARIABLES
from choros.topology import split_address
from choros.transport.address import is_loopback

_BYTES = 32


@dataclass(frozen=True)
class Key:
    """What the processes of a job know, and others do not. ``within_host``: it proves the same user on the same host,
    valid only for direct connections; ``elsewhere`` is then the key between hosts, ``None`` if there must be none.
    """

    secret: bytes = field(repr=False)
    within_host: bool = False
    elsewhere: bytes | None = field(default=None, repr=False)

    def secret_of(self, *, local: bool) -> bytes | None:
        """Returns the key of a connection, within this host if ``local``; ``None`` if none is allowed.

        >>> Key(b"k").secret_of(local=False), Key(b"k", within_host=True).secret_of(local=False)
        (b'k', None)
        """
        return self.secret if local or not self.within_host else self.elsewhere


def job_key(environ: Mapping[str, str], addresses: Iterable[str]) -> Key:
    """Returns the job's key: ``CHOROS_SECRET``, or on one host ``key_of_user``'s; a ``ConfigError`` for neither.

    >>> job_key({"CHOROS_SECRET": "00ff" * 8}, ["a:1", "b:1"]).secret.hex()
    '00ff00ff00ff00ff00ff00ff00ff00ff'
    """
    remote = [] if secret_in(environ) else [address for address in addresses if not _is_local(address)]
    if remote:
        raise ConfigError(
            f"CHOROS_SECRET is not set, and {remote[0]} can be reached from other hosts: the processes of a job need "
            f"it to authenticate each other. {_how_to()}"
        )
    return rank_key(environ, on_one_host=True)


def rank_key(environ: Mapping[str, str], *, on_one_host: bool) -> Key:
    """Returns the key of ranks started without chorosrun: ``CHOROS_SECRET``, or within a host that of ``key_of_user``.
    Between hosts there is none without it: any process that can reach ranks can be one, unless all are ``on_one_host``.
    A ``ConfigError`` as in ``job_key``.
    """
    secret = secret_in(environ)
    if secret is not None:
        return Key(secret)
    return Key(key_of_user(environ), within_host=True, elsewhere=None if on_one_host else b"")


def secret_in(environ: Mapping[str, str]) -> bytes | None:
    """Returns ``CHOROS_SECRET``, ``None`` if it is not set; a ``ConfigError`` if it is no valid hexadecimal key."""
    text = environ.get(VARIABLES["secret"].name, "")
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < 16:
        raise ConfigError(f"CHOROS_SECRET must have 32 hexadecimal digits or more. {_how_to()}")
    return key


def key_of_user(environ: Mapping[str, str]) -> bytes:
    """Returns the key in this user's ``~/.cache/choros/key/secret``, which it creates; without a writable home, in the
    system's temporary directory. A ``ConfigError`` if others could read or replace it.
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    home = cache / "choros" / "key"
    try:
        if not home.is_absolute():
            raise FileNotFoundError(home)
        home.parent.mkdir(parents=True, exist_ok=True)
        return _key_in(home)
    except OSError:
        directory = Path(tempfile.gettempdir()) / f"choros-{os.geteuid()}"
    try:
        return _key_in(directory)
    except OSError as error:
        raise ConfigError(
            f"the key of this job can be kept neither in {home} nor in {directory} ({error.strerror or error}): make "
            f"one of them writable. Or: {_how_to()}"
        ) from error


def _is_local(address: str) -> bool:
    host, _ = split_address(address)
    return host == "localhost" or is_loopback(host)


def _how_to() -> str:
    return (
        "Create one with \"python -c 'import secrets; print(secrets.token_hex(32))'\" and set it in the "
        "environment of every process; chorosrun does this itself."
    )


def _key_in(directory: Path) -> bytes:
    """Returns the key in ``directory``, which only this user can enter; creates both if needed."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    # Every step is relative to the directory that was checked, so that none can be put in its place in between.
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _check(directory, os.fstat(opened))
        try:
            return _read(directory, opened)
        except FileNotFoundError:
            _create(opened)
        return _read(directory, opened)
    finally:
        os.close(opened)


def _read(directory: Path, opened: int) -> bytes:
    descriptor = os.open("secret", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check(directory / "secret", status)
        key = file.read(_BYTES + 1)
    if not stat.S_ISREG(status.st_mode) or len(key) != _BYTES:
        raise ConfigError(f"{directory / 'secret'} is no key of choros: delete it, and it is created anew.")
    return key


def _create(opened: int) -> None:
    temporary = f"secret.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600, dir_fd=opened), "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
    try:
        os.link(temporary, "secret", src_dir_fd=opened, dst_dir_fd=opened)  # Atomic, and fails if another was first.
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary, dir_fd=opened)


def _check(path: Path, status: os.stat_result) -> None:
    problem = problem_with(path, status, READABLE)
    if problem:
        raise ConfigError(f"{problem}. Delete it, and it is created anew. Or set CHOROS_SECRET. {_how_to()}")


_TAG_BYTES = 32


@final
@dataclass(frozen=True)
class Signatures:
    """The signatures of the ranks of one communicator, by a ``key`` that only these ranks have; without one, none.

    >>> signatures = Signatures(b"key")
    >>> signed = signatures.sign(b"data", collective=7, rank=1)
    >>> signatures.verified(signed, collective=7, rank=1)
    b'data'
    >>> signatures.verified(signed, collective=8, rank=1)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    choros.errors.EngineError: an object was not sent by rank 1: another process interferes ...
    """

    key: bytes | None = field(default=None, repr=False)

    @property
    def overhead(self) -> int:
        """The bytes that a signature adds."""
        return 0 if self.key is None else _TAG_BYTES

    def sign(self, data: bytes, *, collective: int, rank: int) -> bytes:
        """Returns ``data`` with the signature of ``rank``."""
        return data if self.key is None else data + _tag(self.key, data, collective, rank)

    def verified(self, signed: bytes, *, collective: int, rank: int) -> bytes:
        """Returns the data that ``rank`` has signed for this collective, or raises an ``EngineError``."""
        if self.key is None:
            return signed
        data, tag = signed[:-_TAG_BYTES], signed[-_TAG_BYTES:]
        if not hmac.compare_digest(tag, _tag(self.key, data, collective, rank)):
            raise EngineError(
                f"an object was not sent by rank {rank}: another process interferes with the connections of the ranks. "
                "It was not unpickled. Start the job again, on a network that only its hosts can reach."
            )
        return data

    def branch(self, name: str) -> Signatures:
        """Returns those of another communicator of these ranks."""
        return Signatures(None if self.key is None else hmac.digest(self.key, name.encode(), "sha256"))


def _tag(key: bytes, data: bytes, collective: int, rank: int) -> bytes:
    return hmac.digest(key, b"%d %d " % (collective, rank) + data, "sha256")
