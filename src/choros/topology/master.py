"""The rendezvous address of ranks that are started without MPI, from the environment. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass

from choros.errors import ConfigError
from choros.topology.environments import SLURM, expand_hosts
from choros.topology.tf_config import TF_CONFIG, parse_port, read_tf_config, split_address

#: The ports of SLURM's job steps: 100 jobs and 100 steps in each have different ones.
_FIRST_PORT, _STEPS, _JOBS = 20_000, 100, 100


@dataclass(frozen=True)
class Master:
    """The rendezvous address of ranks; ``listens``: torchrun's agent already listens there; otherwise rank 0 must."""

    host: str
    port: int
    listens: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def find_master(environ: Mapping[str, str], launcher: str) -> Master | None:
    """Returns the address of ``TF_CONFIG``'s first task, ``MASTER_ADDR``, or for srun the job step's first host.

    >>> print(find_master({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, "torchrun"))
    a:29500
    """
    if launcher == TF_CONFIG:
        config = read_tf_config(environ)
        return Master(*split_address(config.ranks[0])) if config is not None and config.ranks else None
    host, text = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host:
        return _of_slurm(environ, text) if launcher == SLURM.launcher else None
    port = parse_port(text)
    if port is None:
        raise ConfigError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={text!r} are not a valid address: expected a port of 1 … 65535."
        )
    return Master(host, port, listens=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _of_slurm(environ: Mapping[str, str], port: str) -> Master | None:
    """The address of rank 0 in a job step of SLURM; ``None`` if the step is not described."""
    names = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    given = environ.get("SLURM_STEP_NODELIST", "")
    if not given or not all(name.isdecimal() for name in names):
        return None
    hosts = expand_hosts(given)
    if environ.get("SLURM_PROCID") == "0" and environ.get("SLURM_NODEID", "0") != "0":
        raise ConfigError(
            f"rank 0 is not on {hosts[0]}, the first host of SLURM_STEP_NODELIST={given!r}, where the ranks would "
            "connect. Set MASTER_ADDR and MASTER_PORT on every rank: an address of rank 0's host, and a free port."
        )
    job, step = map(int, names)
    chosen = parse_port(port) if port else _FIRST_PORT + job % _JOBS * _STEPS + step % _STEPS
    if chosen is None:
        raise ConfigError(f"MASTER_PORT={port!r} is not a port of 1 … 65535.")
    return Master(hosts[0] if len(hosts) > 1 else "127.0.0.1", chosen)
