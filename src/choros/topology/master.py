"""Where ranks meet that were started without MPI: what the environment says. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.topology.environments import TF_CONFIG, TF_CONFIG_ROLES

__all__ = ["Master", "find_master"]


@dataclass(frozen=True)
class Master:
    """The address at which ranks meet.

    Attributes:
        host: a name or an address.
        port: of TCP.
        listens: something listens there already, torchrun's agent; otherwise rank 0 must.
    """

    host: str
    port: int
    listens: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_master(environ: Mapping[str, str], launcher: str) -> Master | None:
    """Where ranks started by ``launcher`` meet, ``None`` if ``environ`` does not say.

    Args:
        environ: the environment, usually ``os.environ``.
        launcher: as ``detect`` names it. ``TF_CONFIG``'s ranks meet at its first task, all others at
            ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        ConfigError: what it says is no address.

    Example:
        >>> print(find_master({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, "torchrun"))
        a:29500
    """
    if launcher == TF_CONFIG:
        cluster = json.loads(environ[TF_CONFIG])["cluster"]
        first = next(address for role in TF_CONFIG_ROLES for address in cluster.get(role, ()))
        host, _, port = first.rpartition(":")
        return Master(host.strip("[]"), _port(port, f"{TF_CONFIG}: its first task, at {first!r}, is where ranks meet"))
    host = environ.get("MASTER_ADDR", "")
    if not host:
        return None
    port = environ.get("MASTER_PORT", "")
    listens = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Master(host, _port(port, f"MASTER_ADDR={host!r} and MASTER_PORT={port!r} are where ranks meet"), listens)


def _port(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise ConfigError(f"{what}, and {text!r} is no port: expected host:port with a port of 1 … 65535.")
    return int(text)
