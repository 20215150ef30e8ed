"""The messages of a job with parameter servers.

::

    chief or worker                          server
      Hello ────────────────────────────────►             the job whose variables are meant
      "pull", (known, slots) ───────────────►             shards that changed since version `known`, and the
      ◄──────────────── version, shards ─────             current version; for the chief, optimizer slots as well,
                                                          for workers only the counts of updates
      "push", (optimizer, …) ───────────────►             gradients, applied under a lock by a real Keras optimizer
                                                          of each server that has some of its variables
      ◄──────────────── version, shards ─────
      "assign", (values,) ──────────────────►             the last writer wins
      ◄─────────────────────────────── None
      "register", (optimizer, …) ───────────►             creates the optimizer unless it exists
      ◄─────────────────────────────── None
      None ─────────────────────────────────►             from the chief: the job has ended

    chief                                    worker
      the job's name ───────────────────────►             the first message: the worker connects to the servers
      ◄─────────────── Joined, or Failure ───             what it has created itself
      Run ──────────────────────────────────►             a closure; its definitions only once per worker
      ◄────────────────── Ran, or Failure ───
      None ─────────────────────────────────►             after any closure: the job has ended

The requests to a server are the methods of ``Shards`` and their arguments. A server replies to those of a connection in
order. If a request fails, the reply is a ``Failure``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from choros.comm import Array
from choros.parameter_server.placement import Shard, VariableKey

#: Identifies an object that is sent by reference: ``("created", number)``, ``("metric", number)``,
#: ``("part", number, kind, index)`` for a part of a model, and what ``Definition`` names.
Reference = tuple[Any, ...]
#: The values of metrics' variables that a function has changed on a worker. The chief adds them up, so each batch is
#: counted once, and not at all if its worker was lost before it reported.
Report = Mapping[Reference, list[Array]]
#: A server's current version, and the values of the shards that changed since the version that the client knows.
Changed = tuple[int, Mapping[Shard, Array]]
#: Of the variables that an optimizer updates, whether their weights decay, and their constraint.
Updated = Mapping[VariableKey, tuple[bool, Any]]
#: The first message of a process to a server: the job's name, which the chief chose, and its host and number.
Hello = tuple[str, tuple[str, int]]
#: The reply to the job's name, once the worker has connected to the servers: the classes and references of what it has
#: created itself.
Joined = tuple[tuple[str, ...], Mapping[Reference, int]]


@dataclass(frozen=True)
class Definition:
    """How a worker creates an object of the scope, a data set or a function, or compiles a model; or where the weights
    of one are. The reference is ``created``, ``compiled``, ``placed``, ``metric`` or ``dataset`` with a number, or
    ``function`` with its digest; ``revision`` counts calls of ``compile``, else 0. ``pickled`` is empty if the object
    cannot be sent; ``error`` then says why.
    """

    reference: Reference
    revision: int
    pickled: bytes
    error: str = ""


#: Requests that a worker run a function: its key, its arguments, the learning rates of optimizers by their numbers, and
#: the definitions that this worker has not received yet.
Run = tuple[bytes, Any, Mapping[int, float], Sequence[Definition]]
#: The reply: the result, the metrics, the seconds that it took with getting the servers' values, and those of waiting
#: for servers.
Ran = tuple[Any, Report, float, float]
