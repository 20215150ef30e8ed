"""The key with which the processes of a job authenticate each other."""

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
    """Returns the key of the job whose processes listen at ``addresses``.

    This is ``CHOROS_SECRET`` if it is set, as by ``chorosrun``. A job on one host does not need it: then the key is
    read from a file that only this user can read, created when first needed.

    Args:
        environ: the environment variables.
        addresses: the processes' addresses, each ``host:port``.

    Raises:
        ConfigError: the variable is not set and processes are on several hosts, or it is no valid hexadecimal key.

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
    remote = [address for address in addresses if not _is_local(address)]
    if remote:
        raise ConfigError(
            f"{SECRET.name} is not set, and {remote[0]} can be reached from other hosts: the processes of a job need "
            f"it to authenticate each other. {_how_to()}"
        )
    return _key_of_user(Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "choros" / "secret")


def _is_local(address: str) -> bool:
    host, _ = split_address(address)
    return host == "localhost" or is_loopback(host)


def _how_to() -> str:
    return (
        "Create one with \"python -c 'import secrets; print(secrets.token_hex(32))'\" and set it in the "
        "environment of every process; chorosrun does this itself."
    )


def _key_of_user(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        temporary.touch(mode=0o600)
        temporary.write_bytes(secrets.token_bytes(_BYTES))
        try:
            os.link(temporary, path)  # Atomic, and fails if another process was first.
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
    return path.read_bytes()
