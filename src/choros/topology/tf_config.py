"""``TF_CONFIG``: the tasks of a cluster, each with a role and an address, and the task of this process.

::

    {"cluster": {"chief":  ["a:2222"],                 role → the addresses of its tasks, in order
                 "worker": ["b:2222", "c:2222"],
                 "ps":     ["d:2222"]},
     "task": {"type": "worker", "index": 0}}           this process: the first worker, at b:2222

The format is TensorFlow's: https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from choros.errors import ConfigError

#: The name of the variable.
TF_CONFIG = "TF_CONFIG"

_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_CHIEF, _WORKER = "chief", "worker"
#: The roles whose tasks are ranks, in rank order.
_RANKED = (_CHIEF, _WORKER)
_ROLES = (_CHIEF, _WORKER, "ps", "evaluator")
#: The chief's name in TensorFlow 1.
_OLD_CHIEF = "master"


@final
@dataclass(frozen=True)
class TFConfig:
    """A cluster and this process's task, which for an evaluator may not be in it; ``of`` validates both.

    >>> config = TFConfig.of({"worker": ["a:1"], "chief": ["c:1"], "ps": ["p:1"]}, "worker", 0)
    >>> config.ranks
    ('c:1', 'a:1')
    >>> config.rank
    1
    """

    cluster: Mapping[str, tuple[str, ...]]
    role: str
    index: int
    rpc_layer: str | None = None

    @classmethod
    def of(cls, cluster: object, role: object, index: object, rpc_layer: object = None) -> TFConfig:
        """Validates the arguments; ``"master"`` becomes ``"chief"``. A ``ConfigError`` says what to do."""
        checked = _check_cluster(cluster)
        name = _CHIEF if role == _OLD_CHIEF else role
        if not isinstance(name, str) or name not in _ROLES:
            raise ConfigError(f"This process is to be a {role!r}: expected one of the roles {', '.join(_ROLES)}.")
        if isinstance(index, bool) or not str(index).isdecimal():
            raise ConfigError(f"This process is to be {name} {index!r}: its index must be a whole number of 0 or more.")
        number = int(str(index))
        count = len(checked.get(name, ()))
        if number >= count and not (name == "evaluator" and count == 0):
            has = f"{count}: {name} 0 … {count - 1}" if count > 1 else f"{name} 0 only" if count else "none"
            raise ConfigError(
                f"This process is to be {name} {number}, but of these the cluster has {has}. Add the task's address to "
                "the cluster, or correct its index."
            )
        return cls(checked, name, number, None if rpc_layer is None else str(rpc_layer))

    @property
    def ranks(self) -> tuple[str, ...]:
        """The addresses of the tasks that are ranks, in rank order: chief first."""
        return tuple(address for role in _RANKED for address in self.cluster.get(role, ()))

    @property
    def rank(self) -> int | None:
        """The rank of this process; ``None`` for a parameter server or an evaluator, which are not ranks."""
        if self.role not in _RANKED:
            return None
        return self.index + (len(self.cluster.get(_CHIEF, ())) if self.role == _WORKER else 0)

    def text(self) -> str:
        """Returns the variable's value.

        >>> TFConfig.of({"worker": ["a:1"]}, "worker", 0).text()
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        """
        rpc_layer = {} if self.rpc_layer is None else {"rpc_layer": self.rpc_layer}
        return json.dumps(
            {
                "cluster": {role: list(addresses) for role, addresses in self.cluster.items()},
                "task": {"type": self.role, "index": self.index},
                **rpc_layer,
            }
        )


def read_tf_config(environ: Mapping[str, str], role: str | None = None, index: int | None = None) -> TFConfig | None:
    """Returns ``TF_CONFIG``, ``role`` and ``index`` replacing its task's; ``None`` if unset or without a cluster.

    >>> import json
    >>> text = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
    >>> read_tf_config({"TF_CONFIG": text}).rank
    1
    >>> read_tf_config({}) is None
    True
    """
    text = environ.get(TF_CONFIG)
    if not text:
        return None
    try:
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"It is not JSON ({error}): use double quotes, and no comma before a closing bracket."
            ) from None
        if not isinstance(given, dict) or "cluster" not in given:
            raise ConfigError('It has no "cluster": add one with the addresses of all tasks, or unset it to run alone.')
        if given["cluster"] == {}:
            return None
        task = given.get("task", {})
        if not isinstance(task, dict):
            raise ConfigError(f'"task" is {task!r}, not an object with a "type" and an "index".')
        task = {**task, **({} if role is None else {"type": role}), **({} if index is None else {"index": index})}
        if not task.keys() >= {"type", "index"}:
            raise ConfigError(
                'It does not say which task this process is: add a "task" with a "type" and an "index", which differ '
                "from process to process."
            )
        return TFConfig.of(given["cluster"], task["type"], task["index"], given.get("rpc_layer"))
    except ConfigError as error:
        raise ConfigError(f"{TF_CONFIG} cannot be used. {error} Expected JSON like {_EXAMPLE}; got {text!r}.") from None


def split_address(address: str) -> tuple[str, int]:
    """Returns the host and port of ``host:port``, an IPv6 address in brackets; a ``ConfigError`` for another format.

    >>> split_address("[fd00::1]:2222")
    ('fd00::1', 2222)
    """
    host, _, port = address.rpartition(":")
    number = parse_port(port)
    if not host or number is None or (":" in host and not host.startswith("[")):
        raise ConfigError(f"{address!r} is no address: expected host:port with a port of 1 … 65535.")
    return host.strip("[]"), number


def parse_port(text: str) -> int | None:
    """Returns ``text`` as a TCP port, ``None`` if it is not one.

    >>> parse_port("2222"), parse_port("65536"), parse_port("http")
    (2222, None, None)
    """
    # Python refuses to convert thousands of digits.
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else 0
    return number if 0 < number < 1 << 16 else None


def _check_cluster(cluster: object) -> dict[str, tuple[str, ...]]:
    """Validates the cluster; returns role → addresses."""
    if not isinstance(cluster, Mapping):
        raise ConfigError(f"The cluster is {cluster!r}, not an object with a list of addresses for each role.")
    checked: dict[str, tuple[str, ...]] = {}
    tasks: dict[str, str] = {}
    for role, addresses in cluster.items():
        name = _CHIEF if role == _OLD_CHIEF else role
        if name not in _ROLES:
            raise ConfigError(f"The cluster has the role {role!r}: expected {', '.join(_ROLES)}.")
        if not (isinstance(addresses, list | tuple) and all(isinstance(address, str) for address in addresses)):
            raise ConfigError(f"cluster[{role!r}] is {addresses!r}, not a list of addresses.")
        checked[name] = (*checked.get(name, ()), *addresses)
    if len(chiefs := checked.get(_CHIEF, ())) > 1:
        raise ConfigError(f"The cluster has {len(chiefs)} chiefs ({', '.join(chiefs)}): make all but one workers.")
    for task, address in ((f"{role} {i}", address) for role in checked for i, address in enumerate(checked[role])):
        try:
            split_address(address)
        except ConfigError as error:
            raise ConfigError(f"Of {task}, {error}") from None
        if address in tasks:
            raise ConfigError(
                f"{tasks[address]} and {task} have the same address, {address!r}: give each task another port."
            )
        tasks[address] = task
    return checked
