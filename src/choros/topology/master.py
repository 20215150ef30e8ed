"""The rendezvous address of ranks that are started without MPI, from the environment. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.topology.tf_config import TF_CONFIG, parse_port, read_tf_config, split_address

__all__ = ["Master", "find_master"]


@dataclass(frozen=True)
class Master:
    """The rendezvous address of ranks.

    Attributes:
        host: a host name or an IP address.
        port: the TCP port.
        listens: torchrun's agent already listens there; otherwise rank 0 must.
    """

    host: str
    port: int
    listens: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_master(environ: Mapping[str, str], launcher: str) -> Master | None:
    """Returns the rendezvous address of ranks started by ``launcher``, ``None`` if ``environ`` has none.

    Args:
        environ: the environment, usually ``os.environ``.
        launcher: the name of ``detect``'s result. For ``TF_CONFIG`` the address is that of the first task, for all
            others ``MASTER_ADDR`` and ``MASTER_PORT``.

    Raises:
        ConfigError: the variables are not a valid address.

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
            f"MASTER_ADDR={host!r} and MASTER_PORT={text!r} are not a valid address: expected a port of 1 … 65535."
        )
    return Master(host, port, listens=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
