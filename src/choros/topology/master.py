"""Where ranks meet that were started without MPI: what the environment says. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.topology.tf_config import TF_CONFIG, parse_port, read_tf_config, split_address

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
        config = read_tf_config(environ)
        return Master(*split_address(config.ranks[0])) if config is not None and config.ranks else None
    host = environ.get("MASTER_ADDR", "")
    if not host:
        return None
    text = environ.get("MASTER_PORT", "")
    port = parse_port(text)
    if port is None:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={text!r} are where ranks meet, and {text!r} is no port: expected "
            "1 … 65535."
        )
    return Master(host, port, listens=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
