"""The settings: the environment variables that choros reads, with Horovod's names of them; one table.

::

    CHOROS_…, HOROVOD_…  ──► Config ── current() ──► whoever needs one
                         once, in init(), and once in chorosrun, which forwards them to every rank

A row is a field of ``Config``. None changes during a job. The wrapper reads this file without site-packages.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from choros.errors import ConfigError

#: The room that mpirun's files need: they are maps, which end a process by SIGBUS if there is none.
SESSION_BYTES = 4 << 20


#: The engines: for each a note, and the module that it needs.
ENGINES: Mapping[str, tuple[str, str]] = {
    "local": ("one process", ""),
    "mpi": ("", "mpi4py"),
    "torch": ("Gloo", "torch"),
    "xla": ("JAX", "jax"),
}


@dataclass(frozen=True, eq=False)
class Variable:
    """An environment variable: name, default, purpose, valid values (``()``: any). ``aliases``: Horovod's names of it,
    with the values, in lower case, that differ there, and what they are here; empty: unset. With a ``unit`` it is a
    number, ``None`` without a value and a default. ``make`` makes the setting of the text.
    ``page``: of the documentation. ``flag``: of chorosrun, which sets it, in ``group`` of its help; ``key``: that of
    Horovod's configuration files.
    """

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unit: str = ""
    or_zero: bool = True
    make: Callable[[str], Any] = str
    page: str = ""
    flag: str = ""
    group: str = ""
    metavar: str | None = None
    key: str = ""

    def given(self, environ: Mapping[str, str]) -> tuple[str, str]:
        """Returns the set variable, this one before Horovod's, and its value as written here, empty if none is set."""
        if environ.get(self.name):
            return self.name, environ[self.name]
        for alias, values in self.aliases.items():
            value = environ.get(alias, "")
            value = values.get(value.casefold(), value)
            if value:
                return alias, value
        return self.name, ""

    def read(self, environ: Mapping[str, str]) -> Any:
        """Returns the setting in ``environ``; raises a ``ConfigError`` if its value is none.

        >>> VARIABLES["log_level"].read({"HOROVOD_LOG_LEVEL": "trace"})
        'DEBUG'
        >>> VARIABLES["log_level"].read({"HOROVOD_LOG_LEVEL": "trace", "CHOROS_LOG_LEVEL": "error"})
        'ERROR'
        """
        name, text = self.given(environ)
        if self.unit:
            return self._number(name, text or self.default)
        return self.make(self._choice(name, text) if text and self.choices else text or self.default)

    def _choice(self, name: str, text: str) -> str:
        """Returns the one of ``choices`` that ``text`` is, ignoring case."""
        for choice in self.choices:
            if text.casefold() == choice.casefold():
                return choice
        valid = list(self.aliases.get(name, ()))
        valid += [choice for choice in self.choices if choice.casefold() not in valid]
        flag = f", or {self.flag.split()[0]}," if self.flag else ""
        raise ConfigError(f"{name}={text!r} is not one of {', '.join(valid)}. It{flag} sets {self.help}")

    def _number(self, name: str, text: str) -> Any:
        """Returns the number in ``text``, finite, 0 or more (above 0), whole if it is to be an ``int``."""
        if not text:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        is_whole = self.make is int
        if (0 < number < math.inf or (self.or_zero and number == 0)) and not (is_whole and number % 1):
            return self.make(number)  # type: ignore[arg-type]
        valid = "of 0 or more" if self.or_zero else "above 0"
        kind = "whole number" if is_whole else "number"
        raise ConfigError(f"{name}={text!r} is not a {kind} of {self.unit} {valid}. It is {self.help}")


def _row(*variable: Any, **rest: Any) -> Any:
    return field(metadata={"variable": Variable(*variable, **rest)})


def _switch(name: str, default: str, purpose: str, **rest: Any) -> Any:
    return _row(name, default, purpose, ("0", "1"), make="1".__eq__, **rest)


def _word(name: str, default: str, choices: tuple[str, ...], purpose: str, **rest: Any) -> Any:
    return _row(name, default, purpose, choices, **rest)


def _number(name: str, default: str, unit: str, purpose: str, make: Any = float, **rest: Any) -> Any:
    return _row(name, default, purpose, unit=unit, make=make, **rest)


def _text(name: str, purpose: str, **rest: Any) -> Any:
    return _row(name, "", purpose, **rest)


def _on_or_off(text: str) -> bool | None:
    return None if text == "auto" else text == "1"


def _timeline(text: str) -> str | None:
    return text if text not in ("", "DYNAMIC") else None


@dataclass(frozen=True, eq=False, repr=False)
class Config:
    """The settings of a process, read once; ``None``: not set. A row is a setting.

    >>> Config.from_environ({"CHOROS_ENGINE": "mpi"}).engine
    'mpi'
    """

    # fmt: off
    engine: str = _word("CHOROS_ENGINE", "auto", ("auto", *ENGINES),
        "the engine of the collectives: auto selects local for one rank, mpi for ranks that MPI knows, torch for "
        "others.",
        aliases={"HOROVOD_CPU_OPERATIONS": {"mpi": "mpi", "gloo": "torch", "ccl": ""},
                 "HOROVOD_CONTROLLER": {"mpi": "mpi", "gloo": "torch"}}, page="engines.md")
    devices: str = _word("CHOROS_DEVICES", "auto", ("auto", "nccl4py", "torch", "host"),
        "what moves tensors on GPUs: nccl4py or torch.distributed, both without host staging, or the engine, through "
        "host memory; auto selects the first that can.", page="gpus.md")
    autotune: bool = _switch("CHOROS_AUTOTUNE", "0",
        "whether ranks measure at startup which message sizes are fastest on this machine.",
        aliases={"HOROVOD_AUTOTUNE": {}}, page="performance.md",
        flag="--autotune / --no-autotune", group="Tuning", key="autotune.enabled")
    autotune_log: str = _text("CHOROS_AUTOTUNE_LOG",
        "the CSV file to which rank 0 writes what CHOROS_AUTOTUNE measured.",
        aliases={"HOROVOD_AUTOTUNE_LOG": {}},
        flag="--autotune-log-file", group="Tuning", metavar="FILE", key="autotune.log_file")
    fusion_bytes: int | None = _number("CHOROS_FUSION_BYTES", "", "bytes",
        "the size of the messages in which gradients are reduced, by default 4194304; with 0 each on its own.",
        make=int, aliases={"HOROVOD_FUSION_THRESHOLD": {}})
    overlap: bool | None = _word("CHOROS_OVERLAP", "auto", ("auto", "0", "1"),
        "whether gradients are reduced during the backward pass: auto does so on accelerators.",
        make=_on_or_off, page="performance.md")
    allocator: str = _word("CHOROS_ALLOCATOR", "glibc", ("glibc", "jemalloc", "tcmalloc", "system"),
        "the memory allocator of ranks: glibc is configured to keep its pages, system is not configured.",
        page="performance.md")
    log_level: str = _word("CHOROS_LOG_LEVEL", "WARNING", ("DEBUG", "INFO", "WARNING", "ERROR"),
        "the log level: INFO, which chorosrun --verbose sets, logs the engine and why it was selected; DEBUG all "
        "events.",
        aliases={"HOROVOD_LOG_LEVEL": {"trace": "DEBUG", "fatal": "ERROR"}})
    log_time: bool = _switch("CHOROS_LOG_TIME", "0",
        "whether log messages begin with the date and time.",
        aliases={"HOROVOD_LOG_HIDE_TIME": {"0": "1", "1": "0"}},
        flag="--log-with-timestamp / --log-without-timestamp", group="Output", key="logging.with_timestamp")
    stall_seconds: float = _number("CHOROS_STALL_SECONDS", "60", "seconds",
        "the seconds after which chorosrun names the ranks that wait and those that they wait for; with 0 it does "
        "not.",
        aliases={"HOROVOD_STALL_CHECK_DISABLE": {"1": "0", "0": ""}, "HOROVOD_STALL_CHECK_TIME_SECONDS": {}},
        page="hangs.md", flag="--stall-check-warning-time-seconds", group="Waiting", metavar="SECONDS",
        key="stall_check.warning_time_seconds")
    stall_shutdown_seconds: float = _number("CHOROS_STALL_SHUTDOWN_SECONDS", "0", "seconds",
        "the seconds after which chorosrun stops a job in which ranks wait for others; with 0 it does not.",
        aliases={"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": {}},
        flag="--stall-check-shutdown-time-seconds --stall-shutdown", group="Waiting", metavar="SECONDS",
        key="stall_check.shutdown_time_seconds")
    verdict: bool = _switch("CHOROS_VERDICT", "1",
        "whether a job says at its end where the time of its steps went, and what would help.", page="verdict.md")
    merge_output: bool = _switch("CHOROS_MERGE_OUTPUT", "1",
        "whether chorosrun shows equal lines that several ranks write on standard error within a moment as one line.")
    shard_state: bool = _switch("CHOROS_SHARD_STATE", "0",
        "whether each rank has a slice of optimizers' state only, where a script does not say so itself.",
        page="shard-state.md", flag="--shard-state / --no-shard-state", group="Tuning")
    compare_every: int = _number("CHOROS_COMPARE_EVERY", "100", "steps",
        "after how many steps ranks compare what they train, each time again; with 0 only after the first steps.",
        make=int, page="divergence.md")
    divergence: str = _word("CHOROS_DIVERGENCE", "error", ("error", "heal", "warn"),
        "what happens if ranks differ in what they train: an error, the values of most ranks for all, or one warning.",
        page="divergence.md")
    noise_scale: int = _number("CHOROS_NOISE_SCALE", "0", "steps",
        "after how many steps the gradient noise scale is measured, each time again, such as 10: whether a larger "
        "batch would help; with 0 it is not.",
        make=int, page="training.md", flag="--noise-scale", group="Tuning", metavar="STEPS")
    timeline: str | None = _text("CHOROS_TIMELINE",
        "the file to which the job records its timeline, in Chrome's trace format; DYNAMIC, as in Horovod: only "
        "start_timeline() begins one.",
        make=_timeline, aliases={"HOROVOD_TIMELINE": {}}, page="timeline.md",
        flag="--timeline-filename", group="Timeline", metavar="FILE", key="timeline.filename")
    mark_cycles: bool = _switch("CHOROS_TIMELINE_MARK_CYCLES", "0",
        "whether the timeline marks the moments at which all ranks have called a collective.",
        aliases={"HOROVOD_TIMELINE_MARK_CYCLES": {}},
        flag="--timeline-mark-cycles / --no-timeline-mark-cycles", group="Timeline", key="timeline.mark_cycles")
    start_timeout: float = _number("CHOROS_START_TIMEOUT", "300", "seconds",
        "the seconds within which ranks that are started without MPI must connect to each other, and a new rank of an"
        " elastic job must call init().",
        or_zero=False, aliases={"HOROVOD_START_TIMEOUT": {}})
    unreachable_seconds: float = _number("CHOROS_UNREACHABLE_SECONDS", "3", "seconds",
        "the seconds without any answer from a host after which its processes count as lost; at least 2.",
        or_zero=False, page="lost-peers.md")
    elastic: bool = _switch("CHOROS_ELASTIC", "0",
        "whether the job goes on without ranks that die; --min-np, --max-np and --host-discovery-script set it.",
        aliases={"HOROVOD_ELASTIC": {}}, page="elastic.md")
    min_np: int = _number("CHOROS_MIN_NP", "1", "ranks",
        "the number of ranks with which an elastic job goes on; --min-np sets it.",
        make=int)
    max_np: int | None = _number("CHOROS_MAX_NP", "", "ranks",
        "the number of ranks that an elastic job has when all are there; --max-np sets it.",
        make=int)
    elastic_timeout: float = _number("CHOROS_ELASTIC_TIMEOUT", "600", "seconds",
        "the seconds that an elastic job waits for hosts with enough slots; --elastic-timeout sets it.",
        aliases={"HOROVOD_ELASTIC_TIMEOUT": {}})
    reset_limit: int | None = _number("CHOROS_RESET_LIMIT", "", "ranks",
        "how many new ranks an elastic job takes in, and how many times it is started again; --reset-limit sets it.",
        make=int)
    new_rank: str = _text("CHOROS_NEW_RANK",
        "of a rank that another one has started: its number, and for each number the first one on the same host.")
    slots: str = _text("CHOROS_SLOTS",
        "the hosts of an elastic job's ranks, of those to which it may grow too, with commas; chorosrun sets it.")
    spawn: str = _text("CHOROS_SPAWN",
        "the command that starts a new rank of an elastic job: a JSON list, in which {new_rank} stands for its "
        "CHOROS_NEW_RANK; chorosrun sets it.")
    commit_dir: str = _text("CHOROS_COMMIT_DIR",
        "the directory of the job's commits, on a file system that all hosts share: fit under a strategy, and "
        "hvd.elastic.run, commit there, and go on from there when the same command is started again.",
        page="elastic.md")
    commit_steps: int = _number("CHOROS_COMMIT_STEPS", "0", "steps",
        "after how many steps an elastic job commits, in the middle of an epoch too; 0: only when it is to end, and "
        "after each epoch.",
        make=int)
    restarts: int = _number("CHOROS_RESTARTS", "0", "starts",
        "how many times chorosrun has started the ranks of this job again from its last commit.",
        make=int)
    chaos: str = _text("CHOROS_CHAOS",
        "the faults that are injected into the ranks, to see what the job does: kill:rank=1@step=17,"
        "stop:rank=2@step=30+5s,random-kills=3@step=1-50,seed=7.", page="elastic.md")
    spot_notices: str = _word("CHOROS_SPOT_NOTICES", "none", ("none", "aws", "azure", "gcp"),
        "the cloud that ranks of an elastic job ask, every five seconds, whether it takes their machine away: then "
        "they leave after their step.",
        page="elastic.md", flag="--spot-notices", group="Elastic", metavar="CLOUD")
    secret: str = _text("CHOROS_SECRET",
        "the key, in hex, with which processes that MPI did not start authenticate each other. chorosrun generates "
        "one.", page="security.md")
    # fmt: on

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Reads ``environ``; raises a ``ConfigError`` that names the first variable with an invalid value."""
        return cls(**{name: variable.read(environ) for name, variable in VARIABLES.items()})


#: The variables, by the names of the settings.
VARIABLES: Mapping[str, Variable] = {each.name: each.metadata["variable"] for each in fields(Config)}

_config: Config | None = None


def current() -> Config:
    """Returns the settings of this process: as ``init()`` has read them, before it those of now."""
    return Config.from_environ(os.environ) if _config is None else _config


def keep(config: Config | None) -> None:
    """Makes ``config`` the settings of this process; with ``None`` the environment has them again."""
    global _config
    _config = config


_ALGORITHM = "choros selects the algorithm of each collective by the size of the message and the hosts of the ranks."
_SAMPLES = "CHOROS_AUTOTUNE measures once, when ranks start, and takes no samples during training."
_RENDEZVOUS = "ranks find each other through MPI, or at MASTER_ADDR."
_SPARK = "Spark places the ranks of choros.spark without it."

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
    "HOROVOD_SPARK_START_TIMEOUT": "choros.spark.run alone reads it.",
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX": _SPARK,
    "HOROVOD_SPARK_WORK_DIR": _SPARK,
}


def horovod_unused(environ: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each of Horovod's variables in ``environ`` that changes nothing.

    >>> horovod_unused({"HOROVOD_CCL_CACHE": "1", "HOROVOD_AUTOTUNE": "1"})
    ['HOROVOD_CCL_CACHE has no effect: oneCCL is not used.']
    """
    return [f"{name} has no effect: {reason}" for name, reason in HOROVOD_UNUSED.items() if environ.get(name)]
