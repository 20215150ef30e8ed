"""The environment variables: those choros reads, with Horovod's names of them, and Horovod's that change nothing.

They are read once, when a process calls ``init()``, so that a setting cannot change during a job.
``chorosrun`` forwards them to every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from choros.errors import ConfigError

__all__ = ["HOROVOD_UNUSED", "SESSION_BYTES", "VARIABLES", "Alias", "Config", "Variable", "horovod_unused"]

#: The room that mpirun's files need: they are maps, which end a process by SIGBUS if there is none.
SESSION_BYTES = 4 << 20


class Alias(NamedTuple):
    """Horovod's variable of the same purpose.

    Attributes:
        name: its name.
        values: those of its values, in lower case, that are written differently here; an empty one sets nothing.
    """

    name: str
    values: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, default value, valid values (``()``: any), purpose and Horovod's names of it.

    Example:
        >>> LOG_LEVEL.read({"HOROVOD_LOG_LEVEL": "trace"})
        'DEBUG'
        >>> LOG_LEVEL.read({"HOROVOD_LOG_LEVEL": "trace", "CHOROS_LOG_LEVEL": "error"})
        'ERROR'
    """

    name: str
    default: str
    choices: tuple[str, ...]
    help: str
    aliases: tuple[Alias, ...] = ()

    def given(self, environ: Mapping[str, str]) -> tuple[str, str]:
        """Returns the variable that is set, this one before Horovod's, and its value as it is written here.

        The value is empty if none is set.
        """
        if environ.get(self.name):
            return self.name, environ[self.name]
        for alias in self.aliases:
            value = environ.get(alias.name, "")
            value = alias.values.get(value.casefold(), value)
            if value:
                return alias.name, value
        return self.name, ""

    def read(self, environ: Mapping[str, str]) -> str:
        """Returns the value in ``environ``, ignoring case; raises a ``ConfigError`` if it is not one of ``choices``."""
        name, value = self.given(environ)
        if not value or not self.choices:
            return value or self.default
        for choice in self.choices:
            if value.casefold() == choice.casefold():
                return choice
        valid = [each for alias in self.aliases if alias.name == name for each in alias.values]
        valid += [choice for choice in self.choices if choice.casefold() not in valid]
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(valid)}. It sets {self.help}")

    def number(self, environ: Mapping[str, str], unit: str, *, or_zero: bool = True) -> float:
        """Returns the value in ``environ``; raises a ``ConfigError`` if it is not a finite number of 0 or more.

        Args:
            environ: the environment.
            unit: what is counted, for the error.
            or_zero: whether 0 is valid.
        """
        name, text = self.given(environ)
        text = text or self.default
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if 0 < number < math.inf or (or_zero and number == 0):
            return number
        valid = "of 0 or more" if or_zero else "above 0"
        raise ConfigError(f"{name}={text!r} is not a number of {unit} {valid}. It is {self.help}")


ENGINE = Variable(
    "CHOROS_ENGINE",
    "auto",
    ("auto", "local", "mpi", "torch", "xla"),
    "the engine of the collectives: auto selects local for one rank, mpi for ranks that MPI knows, torch for others.",
    (
        Alias("HOROVOD_CPU_OPERATIONS", {"mpi": "mpi", "gloo": "torch", "ccl": ""}),
        Alias("HOROVOD_CONTROLLER", {"mpi": "mpi", "gloo": "torch"}),
    ),
)
DEVICES = Variable(
    "CHOROS_DEVICES",
    "auto",
    ("auto", "nccl4py", "torch", "host"),
    "what moves tensors on GPUs: nccl4py or torch.distributed, both without host staging, or the engine, through host "
    "memory; auto selects the first that can.",
)
AUTOTUNE = Variable(
    "CHOROS_AUTOTUNE",
    "0",
    ("0", "1"),
    "whether ranks measure at startup which message sizes are fastest on this machine.",
    (Alias("HOROVOD_AUTOTUNE"),),
)
AUTOTUNE_LOG = Variable(
    "CHOROS_AUTOTUNE_LOG",
    "",
    (),
    "the CSV file to which rank 0 writes what CHOROS_AUTOTUNE measured.",
    (Alias("HOROVOD_AUTOTUNE_LOG"),),
)
FUSION_BYTES = Variable(
    "CHOROS_FUSION_BYTES",
    "",
    (),
    "the size of the messages in which gradients are reduced; with 0 each gradient is reduced on its own.",
    (Alias("HOROVOD_FUSION_THRESHOLD"),),
)
OVERLAP = Variable(
    "CHOROS_OVERLAP",
    "auto",
    ("auto", "0", "1"),
    "whether gradients are reduced during the backward pass: auto does so on accelerators.",
)
ALLOCATOR = Variable(
    "CHOROS_ALLOCATOR",
    "glibc",
    ("glibc", "jemalloc", "tcmalloc", "system"),
    "the memory allocator of ranks: glibc is configured to keep its pages, system is not configured.",
)
LOG_LEVEL = Variable(
    "CHOROS_LOG_LEVEL",
    "WARNING",
    ("DEBUG", "INFO", "WARNING", "ERROR"),
    "the log level: INFO, which chorosrun --verbose sets, logs the engine and why it was selected; DEBUG all events.",
    (Alias("HOROVOD_LOG_LEVEL", {"trace": "DEBUG", "fatal": "ERROR"}),),
)
LOG_TIME = Variable(
    "CHOROS_LOG_TIME",
    "0",
    ("0", "1"),
    "whether log messages begin with the date and time.",
    (Alias("HOROVOD_LOG_HIDE_TIME", {"0": "1", "1": "0"}),),
)
STALL_SECONDS = Variable(
    "CHOROS_STALL_SECONDS",
    "60",
    (),
    "the seconds after which chorosrun names the ranks that wait and those that they wait for; with 0 it does not.",
    (
        Alias("HOROVOD_STALL_CHECK_DISABLE", {"1": "0", "0": ""}),
        Alias("HOROVOD_STALL_CHECK_TIME_SECONDS"),
    ),
)
STALL_SHUTDOWN_SECONDS = Variable(
    "CHOROS_STALL_SHUTDOWN_SECONDS",
    "0",
    (),
    "the seconds after which chorosrun stops a job in which ranks wait for others; with 0 it does not.",
    (Alias("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),),
)
MERGE_OUTPUT = Variable(
    "CHOROS_MERGE_OUTPUT",
    "1",
    ("0", "1"),
    "whether chorosrun shows equal lines that several ranks write on standard error within a moment as one line.",
)
COMPARE_EVERY = Variable(
    "CHOROS_COMPARE_EVERY",
    "100",
    (),
    "after how many steps ranks compare what they train, each time again; with 0 only after the first steps.",
)
DIVERGENCE = Variable(
    "CHOROS_DIVERGENCE",
    "error",
    ("error", "heal", "warn"),
    "what happens if ranks differ in what they train: an error, the values of most ranks for all, or one warning.",
)
TIMELINE = Variable(
    "CHOROS_TIMELINE",
    "",
    (),
    "the file to which the job records its timeline; DYNAMIC, as in Horovod: only start_timeline() begins one.",
    (Alias("HOROVOD_TIMELINE"),),
)
TIMELINE_MARK_CYCLES = Variable(
    "CHOROS_TIMELINE_MARK_CYCLES",
    "0",
    ("0", "1"),
    "whether the timeline marks the moments at which all ranks have called a collective.",
    (Alias("HOROVOD_TIMELINE_MARK_CYCLES"),),
)
START_TIMEOUT = Variable(
    "CHOROS_START_TIMEOUT",
    "300",
    (),
    "the seconds within which ranks that are started without MPI must connect to each other, and a new rank of an "
    "elastic job must call init().",
    (Alias("HOROVOD_START_TIMEOUT"),),
)
UNREACHABLE_SECONDS = Variable(
    "CHOROS_UNREACHABLE_SECONDS",
    "3",
    (),
    "the seconds without any answer from a host after which its processes count as lost; at least 2.",
)
ELASTIC = Variable(
    "CHOROS_ELASTIC",
    "0",
    ("0", "1"),
    "whether the job goes on without ranks that die; --min-np, --max-np and --host-discovery-script set it.",
    (Alias("HOROVOD_ELASTIC"),),
)
MIN_NP = Variable("CHOROS_MIN_NP", "1", (), "the number of ranks with which an elastic job goes on; --min-np sets it.")
MAX_NP = Variable(
    "CHOROS_MAX_NP", "", (), "the number of ranks that an elastic job has when all are there; --max-np sets it."
)
ELASTIC_TIMEOUT = Variable(
    "CHOROS_ELASTIC_TIMEOUT",
    "600",
    (),
    "the seconds that an elastic job waits for hosts with enough slots; --elastic-timeout sets it.",
    (Alias("HOROVOD_ELASTIC_TIMEOUT"),),
)
RESET_LIMIT = Variable(
    "CHOROS_RESET_LIMIT",
    "",
    (),
    "how many new ranks an elastic job takes in, and how many times it is started again; --reset-limit sets it.",
)
NEW_RANK = Variable(
    "CHOROS_NEW_RANK",
    "",
    (),
    "of a rank that another one has started: its number, and for each number the first one on the same host.",
)
SLOTS = Variable(
    "CHOROS_SLOTS",
    "",
    (),
    "the hosts of an elastic job's ranks, of those to which it may grow too, with commas; chorosrun sets it.",
)
SPAWN = Variable(
    "CHOROS_SPAWN",
    "",
    (),
    "the command that starts a new rank of an elastic job: a JSON list, in which {new_rank} stands for its "
    "CHOROS_NEW_RANK; chorosrun sets it.",
)
COMMIT_DIR = Variable(
    "CHOROS_COMMIT_DIR", "", (), "the directory of the job's commits; --commit-dir sets it. It is on all hosts."
)
COMMIT_STEPS = Variable(
    "CHOROS_COMMIT_STEPS",
    "0",
    (),
    "after how many steps an elastic job commits, in the middle of an epoch too; 0: only when it is to end, and after "
    "each epoch. --commit-steps sets it.",
)
RESTARTS = Variable(
    "CHOROS_RESTARTS", "0", (), "how many times chorosrun has started the ranks of this job again from its last commit."
)
CHAOS = Variable("CHOROS_CHAOS", "", (), "the faults that are injected into the ranks; --chaos sets it.")
SECRET = Variable(
    "CHOROS_SECRET",
    "",
    (),
    "the key, in hex, with which processes that MPI did not start authenticate each other. chorosrun generates one.",
)

VARIABLES: tuple[Variable, ...] = (
    ENGINE,
    DEVICES,
    AUTOTUNE,
    AUTOTUNE_LOG,
    FUSION_BYTES,
    OVERLAP,
    ALLOCATOR,
    LOG_LEVEL,
    LOG_TIME,
    STALL_SECONDS,
    STALL_SHUTDOWN_SECONDS,
    MERGE_OUTPUT,
    COMPARE_EVERY,
    DIVERGENCE,
    TIMELINE,
    TIMELINE_MARK_CYCLES,
    START_TIMEOUT,
    UNREACHABLE_SECONDS,
    ELASTIC,
    MIN_NP,
    MAX_NP,
    ELASTIC_TIMEOUT,
    RESET_LIMIT,
    NEW_RANK,
    SLOTS,
    SPAWN,
    COMMIT_DIR,
    COMMIT_STEPS,
    RESTARTS,
    CHAOS,
    SECRET,
)


_ALGORITHM = "choros selects the algorithm of each collective by the size of the message and the hosts of the ranks."
_SAMPLES = "CHOROS_AUTOTUNE measures once, when ranks start, and takes no samples during training."
_RENDEZVOUS = "ranks find each other through MPI, or at MASTER_ADDR."
_SPARK = "choros has no launcher for Spark."

#: Horovod's variables that users set and that change nothing here, each with the reason.
HOROVOD_UNUSED: Mapping[str, str] = {
    "HOROVOD_CYCLE_TIME": "a collective starts when all ranks have called it, not in cycles.",
    "HOROVOD_CACHE_CAPACITY": "choros sizes its caches itself.",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _ALGORITHM,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _ALGORITHM,
    "HOROVOD_TORUS_ALLREDUCE": _ALGORITHM,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _SAMPLES,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _SAMPLES,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _SAMPLES,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _SAMPLES,
    "HOROVOD_MPI_THREADS_DISABLE": "choros never calls MPI from several threads at once.",
    "HOROVOD_NUM_NCCL_STREAMS": "choros does not distribute collectives over several streams of NCCL.",
    "HOROVOD_THREAD_AFFINITY": "each rank, with all of its threads, is bound to its own cores; chorosrun's "
    "--binding-args changes that.",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "a rank waits for late ones without a limit. chorosrun's --start-timeout limits "
    "the start, --stall-check-shutdown-time-seconds each wait.",
    "HOROVOD_GLOO_IFACE": "chorosrun's --network-interfaces selects the networks of all engines.",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": _RENDEZVOUS,
    "HOROVOD_GLOO_RENDEZVOUS_PORT": _RENDEZVOUS,
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets can be added and removed at any time.",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum has no chunk size of its own.",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "the framework packs the gradients of a GPU.",
    "HOROVOD_DISABLE_GROUP_FUSION": "the argument groups determines which gradients share messages.",
    "HOROVOD_DISABLE_NVTX_RANGES": "choros marks no NVTX ranges.",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "collectives on GPUs are ordered with the framework's stream in any case.",
    "HOROVOD_ENABLE_XLA_OPS": "on JAX, CHOROS_ENGINE=xla compiles collectives; on TensorFlow they run outside of XLA.",
    "HOROVOD_CCL_CACHE": "oneCCL is not used.",
    "HOROVOD_SPARK_PYTHONPATH": _SPARK,
    "HOROVOD_SPARK_START_TIMEOUT": _SPARK,
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": _SPARK,
    "HOROVOD_SPARK_WORK_DIR": _SPARK,
}


def horovod_unused(environ: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each of Horovod's variables in ``environ`` that changes nothing.

    Example:
        >>> horovod_unused({"HOROVOD_CCL_CACHE": "1", "HOROVOD_AUTOTUNE": "1"})
        ['HOROVOD_CCL_CACHE has no effect: oneCCL is not used.']
    """
    return [f"{name} has no effect: {reason}" for name, reason in HOROVOD_UNUSED.items() if environ.get(name)]


@dataclass(frozen=True)
class Config:
    """The settings from the environment, read once.

    Attributes:
        engine: the engine of the collectives, or ``"auto"``.
        devices: what moves tensors on GPUs, or ``"auto"``.
        autotune: whether message sizes are measured.
        autotune_log: the file for what was measured; empty for none.
        fusion_bytes: the size of messages; ``None`` if it is not set; 0: one message for each array.
        overlap: whether gradients are reduced during the backward pass; ``None``: on accelerators.
        compare_every: the number of steps after which ranks compare what they train; 0: only after the first steps.
        heals: whether ranks that differ receive the values of most ranks, in place of an error.
        log_level: the log level.
        log_time: whether log messages begin with the time.
        timeline: the file of the timeline; ``None`` for none.
        mark_cycles: whether it marks the moments at which all ranks have called a collective.
        start_timeout: the seconds within which ranks must connect without MPI.
        stall_seconds: the seconds after which a wait is shown; 0: never.
        stall_shutdown_seconds: the seconds after which a wait ends the job; 0: never.

    Example:
        >>> Config.from_environ({"CHOROS_ENGINE": "mpi"}).engine
        'mpi'
    """

    engine: str
    devices: str
    autotune: bool
    autotune_log: str
    fusion_bytes: int | None
    overlap: bool | None
    compare_every: int
    divergence: str
    log_level: str
    log_time: bool
    timeline: str | None
    mark_cycles: bool
    start_timeout: float
    stall_seconds: float
    stall_shutdown_seconds: float

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Reads ``environ``; raises a ``ConfigError`` that names the first variable with an invalid value."""
        overlap, timeline = OVERLAP.read(environ), TIMELINE.read(environ)
        _, fusion = FUSION_BYTES.given(environ)
        return cls(
            engine=ENGINE.read(environ),
            devices=DEVICES.read(environ),
            autotune=AUTOTUNE.read(environ) == "1",
            autotune_log=AUTOTUNE_LOG.read(environ),
            fusion_bytes=int(FUSION_BYTES.number(environ, "bytes")) if fusion else None,
            overlap=None if overlap == "auto" else overlap == "1",
            compare_every=int(COMPARE_EVERY.number(environ, "steps")),
            divergence=DIVERGENCE.read(environ),
            log_level=LOG_LEVEL.read(environ),
            log_time=LOG_TIME.read(environ) == "1",
            timeline=timeline if timeline not in ("", "DYNAMIC") else None,
            mark_cycles=TIMELINE_MARK_CYCLES.read(environ) == "1",
            start_timeout=START_TIMEOUT.number(environ, "seconds", or_zero=False),
            stall_seconds=STALL_SECONDS.number(environ, "seconds"),
            stall_shutdown_seconds=STALL_SHUTDOWN_SECONDS.number(environ, "seconds"),
        )
