"""The seconds of an exchange, after what choros and Open MPI do: ``comm/engines/mpi_window.py``, ``comm/fusion.py``.

::

    chunk of 4 MiB   ranks of a host: sum a slice each in shared memory ── owners of a slice: allreduce ── copy it back
    between hosts    below 8 KiB: recursive doubling; else Rabenseifner's halving and doubling, by Open MPI's own table
    int8             every rank sends a slice to every other, twice, also within a host: nothing is summed on the way

The costs of the algorithms are those of Thakur, Rabenseifner and Gropp (2005), "Optimization of collective
communication operations in MPICH", with α + n β for each message of n bytes (Hockney 1994; LogP, Culler et al. 1993,
has the same parts).
"""

import math
from dataclasses import dataclass, replace

from choros.comm.primitives import CHUNK_BYTES

#: Larger messages begin with a request and an answer: Open MPI's eager limit on TCP.
_EAGER_BYTES = 64 << 10
#: Below this, Open MPI doubles recursively; from the other on, choros sums in shared memory.
_SMALL_BYTES, _WINDOW_BYTES = 8 << 10, 16 << 10
#: What a rank needs to send one message more, besides its latency: LogP's overhead.
_OVERHEAD_S = 2e-6
#: What a rank has handed to a socket goes before its answer to a request: measured on TCP, with 2 to 6 hosts.
_SOCKET_BYTES = 512 << 10
#: Slices of several hosts meet at the line of a third, and others stand idle meanwhile: measured with 3 to 8 hosts.
_MEETING = 1.2
#: int8 sends a scale of 4 bytes for each 256 numbers.
_INT8 = (1 + 4 / 256) / 4


@dataclass(frozen=True)
class Link:
    """A full-duplex link of each host, or rank, to all others; ``name``: where its figures are from.

    >>> link = Link("slow", latency_s=0.001, bytes_per_s=1e6)
    >>> round(link.message(1000), 6), round(link.message(1_000_000), 6)
    (0.002, 1.003)
    """

    name: str
    latency_s: float
    bytes_per_s: float

    def message(self, nbytes: float) -> float:
        """The seconds from the call to the arrival: a large message waits for the receiver's answer."""
        return (3 if nbytes > _EAGER_BYTES else 1) * self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Machines:
    """Hosts of ``per_host`` ranks: the link ``between`` two, which a host's ranks share; the memory ``within`` one."""

    between: Link
    within: Link
    per_host: int = 1

    def hosts(self, ranks: int) -> int:
        """The number of hosts.

        >>> Machines(Link("", 0, 1), Link("", 0, 1), per_host=8).hosts(20)
        3
        """
        return -(-ranks // self.per_host)

    def local(self, ranks: int) -> int:
        """The ranks of a full host."""
        return min(ranks, self.per_host)


def control_s(ranks: int, machines: Machines) -> float:
    """The seconds of a control message: every rank sends 16 bytes to every other."""
    if ranks == 1:
        return 0.0
    link = machines.between if machines.hosts(ranks) > 1 else machines.within
    return link.message(16) + (ranks - 1) * _OVERHEAD_S


def allreduce_s(ranks: int, nbytes: float, machines: Machines) -> float:
    """The seconds in which ``nbytes`` of each rank are summed, in chunks; without what memory takes (``memory_s``)."""
    starts = range(0, math.ceil(nbytes), CHUNK_BYTES) if ranks > 1 else ()
    return sum(_chunk_s(ranks, min(CHUNK_BYTES, nbytes - start), machines) for start in starts)


def _chunk_s(ranks: int, nbytes: float, machines: Machines) -> float:
    hosts, local = machines.hosts(ranks), machines.local(ranks)
    if local == 1 or (nbytes < _WINDOW_BYTES and hosts > 1):
        return messages_s(ranks, nbytes, machines.between)
    barriers = 2 * math.ceil(math.log2(local)) * machines.within.latency_s
    shared = replace(machines.between, bytes_per_s=machines.between.bytes_per_s / local)
    return barriers + messages_s(hosts, nbytes / local, shared)


def messages_s(members: int, nbytes: float, link: Link) -> float:
    """The seconds of MPI's allreduce of ``nbytes``, by messages between all ``members``.

    >>> link = Link("", latency_s=1.0, bytes_per_s=1.0)
    >>> messages_s(4, 1000, link)  # 2 messages of 1000 bytes, one after the other
    2002.0
    >>> messages_s(4, 40_000, link)  # of 20,000 and 10,000 bytes, and these back
    60004.0
    """
    doublings = members.bit_length() - 1
    odd = members != 1 << doublings  # ranks beyond a power of two give what they have to others, and get the sum
    if nbytes < _SMALL_BYTES:
        return (doublings + 2 * odd) * link.message(nbytes)
    halves = 2 * sum(link.message(nbytes / 2**step) for step in range(1, doublings + 1))
    if not odd:
        return halves
    # One of two that exchange halves has waited: what it sends at once delays its answer to what the other sends.
    late = min(nbytes / 2, _SOCKET_BYTES) / link.bytes_per_s
    return halves + 2 * link.message(nbytes / 2) + link.message(nbytes) + late


def slices_s(ranks: int, nbytes: float, machines: Machines) -> float:
    """The seconds in which int8's slices reach their owners, and sums all ranks; ``nbytes`` before compression. A rank
    sends them to all others at once.
    """
    local = machines.local(ranks)
    peers, each = ranks - local, nbytes * _INT8 / ranks
    link = machines.between
    shared = replace(link, bytes_per_s=link.bytes_per_s / local)
    meeting = _MEETING if machines.hosts(ranks) > 2 else 1.0
    return 2 * (shared.message(each) + (peers * meeting - 1) * each / shared.bytes_per_s) if peers else 0.0


def factors_nbytes(nbytes: float, arrays: int, rank: int) -> float:
    """The bytes of PowerSGD's factors: half of the arrays count as equal square matrices, the others as vectors.

    >>> factors_nbytes(4 * 1000 * 1000, arrays=2, rank=4)
    32000.0
    """
    matrices = max(1, arrays // 2)
    side = math.sqrt(nbytes / 4 / matrices)
    return min(nbytes, 4 * 2 * side * rank * matrices)


def memory_s(ranks: int, nbytes: float, moves: float, sums: tuple[float, float], machines: Machines) -> float:
    """The seconds in which a rank moves its bytes through memory: ``moves`` times to pack and unpack them, and for its
    part of the ``sums`` within its host and between hosts.
    """
    local, hosts = machines.local(ranks), machines.hosts(ranks)
    parts = sums[0] * (local - 1) / local + sums[1] * (hosts - 1) / hosts / local
    return (moves + parts) * nbytes / machines.within.bytes_per_s
