"""The model of a step: what it computes, its wait for the slowest rank, and what of its exchange is not hidden::

rank 0    ── compute ──┤       wait      ├ agree ┤── exchange ──┤
rank 1    ── compute + straggler ────────┤ agree ┤── exchange ──┤

overlap   ── forward ──├── backward ─────┤
                            ├ bucket 0 ┤├ bucket 1 ┤            a bucket begins when it is ready and the last is done
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from choros.forecast.costs import Link, Machines, allreduce_s, control_s, factors_nbytes, memory_s, slices_s
from choros.forecast.workload import Bucket, Workload

#: Of a step's computation, where the timeline has no buckets that tell: a backward pass takes twice the forward pass.
_BACKWARD = 2 / 3
#: The buckets of CHOROS_OVERLAP.
_BUCKET_BYTES = 8 << 20
#: How long ranks take to go on without one that has failed.
_RECOVERY_S = 3.0
#: The memory of a host whose timeline does not tell.
SHARED_MEMORY = Link("shared memory", 10e-6, 4e9)


@dataclass(frozen=True)
class Setting:
    """How gradients are reduced; ``moves``: how often their bytes pass through memory to be packed and unpacked, as a
    multiple of a copy's time; ``sums``: what it takes to sum all of them within a host, by NumPy, and between hosts, by
    MPI: with float16 more than to copy them.
    """

    name: str
    moves: float = 2
    sums: tuple[float, float] = (2, 0)
    power: int = 0
    every: int = 1
    overlaps: bool = False
    fraction: float = 1.0
    sliced: bool = False

    def exchange_s(self, bucket: Bucket, ranks: int, machines: Machines) -> float:
        """The seconds in which a bucket is reduced."""
        memory = memory_s(ranks, bucket.nbytes, self.moves, self.sums, machines)
        if self.sliced:
            return memory + slices_s(ranks, bucket.nbytes, machines)
        if self.power:  # two sums, one after the other
            half = factors_nbytes(bucket.nbytes, bucket.arrays, self.power) / 2
            return memory + 2 * allreduce_s(ranks, half, machines)
        return memory + allreduce_s(ranks, bucket.nbytes * self.fraction, machines)


def settings(every: int, power: int) -> tuple[Setting, ...]:
    """Returns all settings. Sharded state sends what plain does: a reduce-scatter, then an allgather, are an allreduce.

    >>> [setting.name for setting in settings(every=16, power=4)]
    ['plain', 'fp16', 'int8', 'power_sgd(4)', 'DiLoCo, every 16', 'overlap', 'sharded state']
    """
    return (
        Setting("plain"),
        Setting("fp16", moves=9, sums=(9, 20), fraction=0.5),
        Setting("int8", moves=18, sliced=True),
        Setting(f"power_sgd({power})", moves=9, power=power),
        Setting(f"DiLoCo, every {every}", moves=6, every=every),
        Setting("overlap", overlaps=True),
        Setting("sharded state"),
    )


@dataclass(frozen=True)
class Failures:
    """How often a rank fails, and the seconds of what follows; choros recovers in place, other jobs are restarted."""

    mtbf_s: float
    checkpoint_s: float
    restart_s: float

    def restarting(self, ranks: int) -> float:
        """By what the time grows with checkpoints as often as is best (Young 1974), and restarts (Daly 2006).

        >>> round(Failures(mtbf_s=3600 * 1000, checkpoint_s=30, restart_s=120).restarting(ranks=100), 3)
        1.045
        """
        mean = self.mtbf_s / ranks
        interval = math.sqrt(2 * self.checkpoint_s * mean)
        try:
            return mean * math.exp(self.restart_s / mean) * math.expm1((interval + self.checkpoint_s) / mean) / interval
        except OverflowError:  # it never ends
            return math.inf

    def in_place(self, ranks: int, step_s: float) -> float:
        """By what it grows if the ranks that are left make the step again."""
        return 1 + (_RECOVERY_S + step_s) * ranks / self.mtbf_s


@dataclass(frozen=True)
class Forecast:
    """A step of ``ranks`` ranks, in seconds; ``exchange_s``: what of its exchange is not hidden."""

    ranks: int
    setting: str
    compute_s: float
    straggler_s: float
    exchange_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.straggler_s + self.exchange_s

    @property
    def efficiency(self) -> float:
        """The speed of a rank, against one that is alone."""
        return self.compute_s / self.step_s

    def epoch_s(self, workload: Workload, steps: int) -> float:
        """The seconds of an epoch of ``steps`` steps of the recorded ranks: more ranks make fewer."""
        return self.step_s * math.ceil(steps * workload.ranks / self.ranks)

    def cost(self, workload: Workload, steps: int, price: float) -> float:
        """What an epoch costs, at ``price`` for an hour of a rank."""
        return self.epoch_s(workload, steps) / 3600 * self.ranks * price


def predict(workload: Workload, ranks: int, setting: Setting, machines: Machines) -> Forecast:
    """Returns the step of ``workload`` on ``ranks`` ranks.

    >>> link = Link("", latency_s=0.0, bytes_per_s=1e9)
    >>> work = Workload(1, 1, 1.0, (0.0,), (Bucket(10**9, 1, 1.0),), 0.0)
    >>> step = predict(work, 2, Setting("plain", moves=0), Machines(link, link))
    >>> round(step.exchange_s, 3), round(step.efficiency, 3)
    (1.0, 0.5)
    """
    if ranks == 1:
        return Forecast(1, setting.name, workload.compute_s, 0.0, 0.0)
    straggler_s = workload.straggler_s(ranks) / math.sqrt(setting.every)  # sums of steps spread less than each
    buckets = _overlapped(workload) if setting.overlaps else (_joined(workload.buckets, workload.compute_s),)
    control = control_s(ranks, machines)
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.ready_s) + control + setting.exchange_s(bucket, ranks, machines)
    exchange_s = (end - workload.compute_s) / setting.every
    exchange_s += sum(control + allreduce_s(ranks, nbytes, machines) for nbytes in workload.others)
    return Forecast(ranks, setting.name, workload.compute_s, straggler_s, exchange_s)


def _joined(buckets: Sequence[Bucket], ready_s: float) -> Bucket:
    return Bucket(sum(each.nbytes for each in buckets), sum(each.arrays for each in buckets), ready_s)


def _overlapped(workload: Workload) -> tuple[Bucket, ...]:
    """The buckets that are sent during the backward pass: the recorded ones, or equal ones."""
    if len(workload.buckets) > 1:
        return workload.buckets
    count = max(1, round(workload.nbytes / _BUCKET_BYTES))
    arrays = max(1, _joined(workload.buckets, 0).arrays // count)
    first = workload.compute_s * (1 - _BACKWARD)
    return tuple(
        Bucket(workload.nbytes // count, arrays, first + workload.compute_s * _BACKWARD * number / count)
        for number in range(1, count + 1)
    )


def memory_of(workload: Workload) -> Link:
    """The memory of the recorded host, from how long its ranks took to reduce."""
    if workload.hosts > 1 or not workload.transfer_s or not workload.nbytes:
        return SHARED_MEMORY
    moved = (2 + 2 * (workload.ranks - 1) / workload.ranks) * workload.nbytes
    return replace(SHARED_MEMORY, name="memory, as recorded", bytes_per_s=moved / workload.transfer_s)


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """The fastest of ``forecasts`` of the same ranks; of those as fast, the first."""
    return min(forecasts, key=lambda each: round(each.step_s, 9))
