"""The environment variables of clusters that start the same command on each of their hosts, as one table. Pure.

A row says which host this is, and where the first one is; chorosrun on it starts the ranks of all (``launch/agents``).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from choros.errors import ConfigError
from choros.settings import VARIABLES
from choros.topology.tf_config import parse_port, split_address

Environ = Mapping[str, str]

#: Where the first host listens, if the cluster does not say it.
PORT = 29_519
_PORT_VARIABLES = ("PET_MASTER_PORT", "MASTER_PORT")


@dataclass(frozen=True)
class ClusterHost:
    """Hosts on which a cluster has started the same command; this one is number ``index`` of ``size`` (``None``: as
    many as ranks are wanted). ``first``: the address of number 0, which may be empty there. ``slots``: how many
    ranks this host takes; from variables, its accelerators, as far as the cluster says.
    """

    name: str
    index: int
    size: int | None
    first: str = ""
    slots: int | None = None
    port: int = PORT


def find_cluster(environ: Environ, full_name: Callable[[], str]) -> ClusterHost | None:
    """Returns the cluster of several hosts that has started this process, ``None`` if none has. ``full_name`` returns
    this host's name with its domain. A ``ConfigError`` names variables that contradict each other.

    >>> find_cluster({"SKYPILOT_NODE_IPS": "10.0.0.1\\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}, str)
    ClusterHost(name='SkyPilot', index=1, size=2, first='10.0.0.1', slots=None, port=29519)
    >>> find_cluster({}, str)
    """
    found = None
    for read in (_torchrun, _skypilot, _aws_batch, _sagemaker, _vertex):
        try:
            found = found or read(environ)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            names, _, _ = (read.__doc__ or "").partition(":")
            raise ConfigError(
                f"the variables that a cluster has set ({names}) cannot be read: {error!r}. Unset them, or name the "
                "hosts with -H."
            ) from error
    found = found or _indexed_job(environ, full_name)
    if found is None or found.size == 1:
        return None
    if found.index and not found.first:
        raise ConfigError(f"{found.name} does not say where the first host is, and this is number {found.index}.")
    if found.size is not None and not 0 <= found.index < found.size:
        raise ConfigError(f"{found.name}: this host is number {found.index} of {found.size}.")
    given = next((environ[name] for name in _PORT_VARIABLES if environ.get(name)), None)
    port = PORT if given is None else parse_port(given)
    if port is None:
        raise ConfigError(f"{given!r}, in one of {', '.join(_PORT_VARIABLES)}, is not a port of 1 … 65535.")
    return replace(found, port=port)


def _torchrun(environ: Environ) -> ClusterHost | None:
    """PET_…: the variables of torchrun, as Kubeflow Trainer sets them for its torch policy."""
    if "PET_NODE_RANK" not in environ or "PET_NNODES" not in environ:
        return None
    slots = environ.get("PET_NPROC_PER_NODE", "")
    least, _, most = environ["PET_NNODES"].partition(":")
    if most not in ("", least):
        raise ConfigError(
            f"PET_NNODES={environ['PET_NNODES']}: expected one number of hosts. chorosrun --min-np makes a job elastic."
        )
    return ClusterHost(
        "Kubeflow",
        int(environ["PET_NODE_RANK"]),
        int(least),
        environ.get("PET_MASTER_ADDR", ""),
        int(slots) if slots.isdecimal() else None,
    )


def _skypilot(environ: Environ) -> ClusterHost | None:
    """SKYPILOT_…: see docs.skypilot.co, "Environment variables"."""
    if "SKYPILOT_NODE_IPS" not in environ:
        return None
    hosts = environ["SKYPILOT_NODE_IPS"].split()
    slots = int(environ.get("SKYPILOT_NUM_GPUS_PER_NODE") or 0)
    return ClusterHost("SkyPilot", int(environ["SKYPILOT_NODE_RANK"]), len(hosts), hosts[0], slots or None)


def _aws_batch(environ: Environ) -> ClusterHost | None:
    """AWS_BATCH_…: those of multi-node parallel jobs; the main node may be any of them."""
    if "AWS_BATCH_JOB_NODE_INDEX" not in environ:
        return None
    index, main = int(environ["AWS_BATCH_JOB_NODE_INDEX"]), int(environ["AWS_BATCH_JOB_MAIN_NODE_INDEX"])
    first = environ.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "")
    position = 0 if index == main else index + (index < main)
    return ClusterHost("AWS Batch", position, int(environ["AWS_BATCH_JOB_NUM_NODES"]), first)


def _sagemaker(environ: Environ) -> ClusterHost | None:
    """SM_…: those of SageMaker's training toolkit."""
    if "SM_HOSTS" not in environ:
        return None
    hosts = sorted(json.loads(environ["SM_HOSTS"]), key=lambda host: (len(host), host))
    slots = int(environ.get("SM_NUM_GPUS") or 0)
    index = hosts.index(environ["SM_CURRENT_HOST"])
    return ClusterHost("SageMaker", index, len(hosts), hosts[0], slots or None)


def _vertex(environ: Environ) -> ClusterHost | None:
    """CLUSTER_SPEC: that of Vertex AI, whose worker pools are taken in the order of their names; others set it, too."""
    if '"workerpool0"' not in environ.get("CLUSTER_SPEC", ""):
        return None
    given = json.loads(environ["CLUSTER_SPEC"])
    pools = sorted(name for name in given["cluster"] if name.startswith("workerpool"))
    hosts = [(name, index) for name in pools for index in range(len(given["cluster"][name]))]
    index = hosts.index((given["task"]["type"], int(given["task"]["index"])))
    first, _ = split_address(given["cluster"][pools[0]][0])
    return ClusterHost("Vertex AI", index, len(hosts), first)


def _indexed_job(environ: Environ, full_name: Callable[[], str]) -> ClusterHost | None:
    """A Job of Kubernetes whose pods have an index, and in their names a headless service. Without ``CHOROS_SECRET``,
    which they need, each pod may be a job of its own, as in a sweep.
    """
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal() or not VARIABLES["secret"].given(environ)[1]:
        return None
    own, _, domain = full_name().partition(".")
    first = f"{own.removesuffix(f'-{index}')}-0.{domain}" if domain and own.endswith(f"-{index}") else ""
    if int(index) and not first:
        raise ConfigError(
            f"this pod, number {index} of an Indexed Job, has the name {full_name()!r}, which no service has given a "
            "domain: give the Job's pods the `subdomain` of a headless service, as `choros deploy kubernetes` does."
        )
    return ClusterHost("an Indexed Job", int(index), None, first)
