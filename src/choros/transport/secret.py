"""The key by which the processes of a job know each other."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from choros.config import SECRET
from choros.errors import ConfigError
from choros.topology import split_address
from choros.transport.address import is_loopback

__all__ = ["job_key"]

_BYTES = 32


def job_key(environ: Mapping[str, str], addresses: Iterable[str]) -> bytes:
    """The key of the job whose processes listen at ``addresses``.

    ``CHOROS_SECRET`` if it is set, as ``chorosrun`` does. A job within one host can do without: then the key is in a
    file that only this user can read, made when it is first needed.

    Args:
        environ: the environment.
        addresses: each ``host:port``.

    Raises:
        ConfigError: it is not set, and processes are on several hosts; or it is no number in hexadecimal digits.

    Example:
        >>> job_key({"CHOROS_SECRET": "00ff" * 8}, ["a:1", "b:1"]).hex()
        '00ff00ff00ff00ff00ff00ff00ff00ff'
    """
    text = environ.get(SECRET.name, "")
    if text:
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) < 16:
            raise ConfigError(f"{SECRET.name} must have 32 hexadecimal digits or more. {_how_to()}")
        return key
    away = [address for address in addresses if not _here(address)]
    if away:
        raise ConfigError(
            f"{SECRET.name} is not set, and {away[0]} can be reached from other hosts: by it, processes of a job "
            f"prove to each other that they belong together. {_how_to()}"
        )
    return _key_of_user(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choros" / "secret")


def _here(address: str) -> bool:
    host, _ = split_address(address)
    return host == "localhost" or is_loopback(host)


def _how_to() -> str:
    return (
        "Make one with \"python -c 'import secrets; print(secrets.token_hex(32))'\" and set it alike in the "
        "environment of every process; chorosrun does so by itself."
    )


def _key_of_user(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(_BYTES))
        try:
            os.link(draft, path)  # All at once, and only if no other process was first.
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_bytes()
