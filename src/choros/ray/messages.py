"""What the executor, its actors and the ranks send one another, and the settings of an executor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The names with which the executor and an actor prove that they have the key.
REGISTRY, ACTOR = "choros.ray's executor", "choros.ray's actor"
#: To a rank: its node goes away; leave in order.
LEAVE = "leave"
#: To a rank: there are no further calls.
END = "end"


@dataclass
class RaySettings:
    """The settings of an executor, in seconds; ``discovery`` says where elastic jobs may run, as Horovod's."""

    nics: Any = None
    verbose: int = 1
    key: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    elastic: bool = False
    discovery: Any = None
    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor is: ``machine``, the same for all Ray nodes of a machine; ``address``: where its rank connects."""

    node: str
    machine: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Take:
    """A rank's first message to the executor: it wants an actor on its ``machine``, the launcher's ``host``; not that
    at ``lost``, which does not answer. It is answered with a ``Seat``, or, as there has been no actor for it, with the
    seconds for which it has waited. The rank sends its number to its actor, and then to the executor.
    """

    rank: int
    machine: str
    host: str
    lost: str = ""


@dataclass(frozen=True)
class Seat:
    """The actor of a rank: its address, and what to add to the rank's environment."""

    address: str
    environ: Mapping[str, str]


@dataclass(frozen=True)
class Vacancies:
    """To the ranks: how many actors have no rank, by the launcher's names of their hosts."""

    actors: Mapping[str, int]


@dataclass(frozen=True)
class CallOnRank:
    """To a rank: call this with its object, or if it ``creates`` that, without. It answers with bytes, what the call
    returns, pickled; or with the traceback, and ends.
    """

    packed: bytes
    creates: bool = False


@dataclass(frozen=True)
class Logged:
    """To the executor: what ``log`` was given."""

    info: Any
