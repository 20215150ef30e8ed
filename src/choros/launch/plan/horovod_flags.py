"""horovodrun's flags, all of them, and what each does here: one table, which chorosrun and choros.run read.

A row is one flag, or a pair of flags for on and off. What it does is one of three things::

    Same        chorosrun has it: a field of ``Arguments``, or a request for information
    Sets        it sets a variable of ``config.py`` for the ranks
    NoEffect    it is accepted, and a line on standard error says why it changes nothing

The same values are in Horovod's configuration files, under ``section.key`` (``config_file.py``). Rows are named tuples,
which are made in a tenth of a dataclass's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from choros import config
from choros.config import HOROVOD_UNUSED, Variable
from choros.errors import ConfigError

__all__ = [
    "HOROVOD_FLAGS",
    "LEVELS",
    "HorovodFlag",
    "NoEffect",
    "Same",
    "Sets",
    "Value",
    "check",
    "unused",
    "variables",
]

#: Horovod's levels of log messages.
LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class Value(Enum):
    """What follows a flag, or its value in a configuration file."""

    SWITCH = "true or false"
    WHOLE = "a whole number, 0 or more"
    NUMBER = "a number, 0 or more"
    SHARE = "a number from 0 to 1"
    TEXT = "a text"
    LEVEL = f"one of {', '.join(LEVELS)}"
    TWO = "two whole numbers"


class Same(NamedTuple):
    """chorosrun has the flag; ``note`` says what differs."""

    note: str = ""


class Sets(NamedTuple):
    """The flag sets a variable for the ranks.

    Attributes:
        variable: the variable.
        value: its value for the flag's; an empty one sets nothing.
        group: the heading under which ``--help`` lists the flag; empty: it does not.
        help: its help.
    """

    variable: Variable
    value: Callable[[Any], str]
    group: str = ""
    help: str = ""


class NoEffect(NamedTuple):
    """The flag changes nothing, because of ``reason``."""

    reason: str


class HorovodFlag(NamedTuple):
    """A row of the table.

    Attributes:
        dest: the name of its value in Horovod: of the argument of ``horovod.run``, if that has one.
        names: its spellings, as ``-np --num-proc``; those that switch it off follow ``/``.
        does: what it does here.
        value: what follows it.
        keys: its keys in a configuration file.
        metavar: the name of its value in the help.
    """

    dest: str
    names: str
    does: Same | Sets | NoEffect
    value: Value = Value.TEXT
    keys: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def on(self) -> list[str]:
        """The spellings, without those that switch it off."""
        return self.names.partition("/")[0].split()

    @property
    def off(self) -> list[str]:
        """The spellings that switch it off."""
        return self.names.partition("/")[2].split()

    def accepts(self, value: object) -> bool:
        """Returns whether ``value`` is one for this flag."""
        if self.value is Value.SWITCH:
            return isinstance(value, bool)
        if self.value is Value.TEXT:
            return isinstance(value, str)
        if self.value is Value.LEVEL:
            return isinstance(value, str) and value.upper() in LEVELS
        if self.value is Value.TWO:
            return isinstance(value, Sequence) and len(value) == 2
        if isinstance(value, bool) or not isinstance(value, int if self.value is Value.WHOLE else (int, float)):
            return False
        return 0 <= value <= (1 if self.value is Value.SHARE else math.inf)

    def spelled(self, value: object, *, in_python: bool = False) -> str:
        """Returns the flag as it was given with ``value``, for messages."""
        if in_python:
            return self.dest
        return next(name for name in (self.off if value is False else self.on) if name.startswith("--"))


def _unused(variable: str) -> NoEffect:
    return NoEffect(HOROVOD_UNUSED[f"HOROVOD_{variable}"])


def _on_or_off(value: bool) -> str:
    return "1" if value else "0"


def _level(value: str) -> str:
    return config.LOG_LEVEL.read({"HOROVOD_LOG_LEVEL": value})


_STALL_CHECK = "Name the ranks that wait, and those that they wait for, after --stall-check-warning-time-seconds."

# fmt: off
HOROVOD_FLAGS: tuple[HorovodFlag, ...] = (
    HorovodFlag("version", "-v --version", Same(), Value.SWITCH),
    HorovodFlag("num_proc", "-np --num-proc", Same(
        "also `-n`; without it: the number of slots of the hosts, of a scheduler's allocation, or of accelerators"),
        Value.WHOLE),
    HorovodFlag("check_build", "-cb --check-build", Same(), Value.SWITCH),
    HorovodFlag("disable_cache", "--disable-cache", NoEffect(
        "chorosrun checks the hosts at every start and caches nothing."), Value.SWITCH),
    HorovodFlag("start_timeout", "--start-timeout", Same(), Value.WHOLE),
    HorovodFlag("network_interfaces", "--network-interfaces", Same("also networks, such as `10.0.0.0/24`")),
    HorovodFlag("network_interface", "--network-interface", Same("may be given more than once")),
    HorovodFlag("output_filename", "--output-filename", Same("also `--output-dir`")),
    HorovodFlag("verbose", "--verbose", Same(), Value.SWITCH),
    HorovodFlag("config_file", "--config-file", Same(
        "flags on the command line override it; a key that it does not know is an error")),
    HorovodFlag("ssh_port", "-p --ssh-port", Same(), Value.WHOLE),
    HorovodFlag("ssh_identity_file", "-i --ssh-identity-file", Same()),

    HorovodFlag("fusion_threshold_mb", "--fusion-threshold-mb", Sets(
        config.FUSION_BYTES, lambda megabytes: str(megabytes << 20), "Tuning",
        "The size of the messages in which gradients are reduced; 0: each gradient on its own. Default: 4, which fits "
        "the caches."), Value.WHOLE, ("params.fusion_threshold_mb",), "MiB"),
    HorovodFlag("cycle_time_ms", "--cycle-time-ms", _unused("CYCLE_TIME"), Value.NUMBER, ("params.cycle_time_ms",)),
    HorovodFlag("cache_capacity", "--cache-capacity", _unused("CACHE_CAPACITY"), Value.WHOLE,
                ("params.cache_capacity",)),
    HorovodFlag("hierarchical_allreduce", "--hierarchical-allreduce / --no-hierarchical-allreduce",
                _unused("HIERARCHICAL_ALLREDUCE"), Value.SWITCH, ("params.hierarchical_allreduce",)),
    HorovodFlag("hierarchical_allgather", "--hierarchical-allgather / --no-hierarchical-allgather",
                _unused("HIERARCHICAL_ALLGATHER"), Value.SWITCH, ("params.hierarchical_allgather",)),
    HorovodFlag("torus_allreduce", "--torus-allreduce / --no-torus-allreduce",
                _unused("TORUS_ALLREDUCE"), Value.SWITCH, ("params.torus_allreduce",)),

    HorovodFlag("autotune", "--autotune / --no-autotune", Sets(
        config.AUTOTUNE, _on_or_off, "Tuning",
        "Measure when the ranks start which message sizes are fastest on this machine."),
        Value.SWITCH, ("autotune.enabled",)),
    HorovodFlag("autotune_log_file", "--autotune-log-file", Sets(
        config.AUTOTUNE_LOG, str, "Tuning", "With --autotune: write what was measured to this CSV file."),
        Value.TEXT, ("autotune.log_file",), "FILE"),
    HorovodFlag("autotune_warmup_samples", "--autotune-warmup-samples", _unused("AUTOTUNE_WARMUP_SAMPLES"),
                Value.WHOLE, ("autotune.warmup_samples",)),
    HorovodFlag("autotune_steps_per_sample", "--autotune-steps-per-sample", _unused("AUTOTUNE_STEPS_PER_SAMPLE"),
                Value.WHOLE, ("autotune.steps_per_sample",)),
    HorovodFlag("autotune_bayes_opt_max_samples", "--autotune-bayes-opt-max-samples",
                _unused("AUTOTUNE_BAYES_OPT_MAX_SAMPLES"), Value.WHOLE, ("autotune.bayes_opt_max_samples",)),
    HorovodFlag("autotune_gaussian_process_noise", "--autotune-gaussian-process-noise",
                _unused("AUTOTUNE_GAUSSIAN_PROCESS_NOISE"), Value.SHARE, ("autotune.gaussian_process_noise",)),

    HorovodFlag("min_num_proc", "--min-np --min-num-proc", Same(), Value.WHOLE),
    HorovodFlag("max_num_proc", "--max-np --max-num-proc", Same("without it: as many as -np"), Value.WHOLE),
    HorovodFlag("slots", "--slots-per-host", Same(), Value.WHOLE),
    HorovodFlag("elastic_timeout", "--elastic-timeout", Same(
        "how long chorosrun waits for hosts with enough slots when some were lost"), Value.WHOLE),
    HorovodFlag(
        "reset_limit",
        "--reset-limit",
        Same("how many new ranks take the places of lost ones, and how many times chorosrun starts the job again"),
        Value.WHOLE,
    ),
    HorovodFlag("cooldown_range", "--blacklist-cooldown-range", Same(
        "for hosts that have been lost three times"), Value.TWO),

    HorovodFlag("timeline_filename", "--timeline-filename", Sets(
        config.TIMELINE, str, "Timeline", "Write a timeline of all ranks to this file, in Chrome's trace format."),
        Value.TEXT, ("timeline.filename",), "FILE"),
    HorovodFlag("timeline_mark_cycles", "--timeline-mark-cycles / --no-timeline-mark-cycles", Sets(
        config.TIMELINE_MARK_CYCLES, _on_or_off, "Timeline",
        "Mark the moments at which all ranks have called a collective."),
        Value.SWITCH, ("timeline.mark_cycles",)),

    HorovodFlag("stall_check_warning_time_seconds", "--stall-check-warning-time-seconds", Sets(
        config.STALL_SECONDS, str, "Waiting", "How long a rank waits for others until that is shown. Default: 60."),
        Value.WHOLE, ("stall_check.warning_time_seconds",), "SECONDS"),
    HorovodFlag("stall_check_shutdown_time_seconds", "--stall-check-shutdown-time-seconds --stall-shutdown", Sets(
        config.STALL_SHUTDOWN_SECONDS, str, "Waiting",
        "How long a rank waits for others until the job is stopped. Default: 0, for no limit."),
        Value.WHOLE, ("stall_check.shutdown_time_seconds",), "SECONDS"),
    HorovodFlag("stall_check", "--stall-check / --no-stall-check", Sets(
        config.STALL_SECONDS, lambda checks: "" if checks else "0", "Waiting", _STALL_CHECK),
        Value.SWITCH, ("stall_check.enabled",)),

    HorovodFlag("mpi_threads_disable", "--mpi-threads-disable / --no-mpi-threads-disable",
                _unused("MPI_THREADS_DISABLE"), Value.SWITCH, ("library_options.mpi_threads_disable",)),
    HorovodFlag("mpi_args", "--mpi-args", Same()),
    HorovodFlag("tcp", "--tcp", Same(), Value.SWITCH),
    HorovodFlag("binding_args", "--binding-args", Same()),
    HorovodFlag("num_nccl_streams", "--num-nccl-streams", _unused("NUM_NCCL_STREAMS"), Value.WHOLE,
                ("library_options.num_nccl_streams",)),
    HorovodFlag("thread_affinity", "--thread-affinity", _unused("THREAD_AFFINITY"), Value.WHOLE,
                ("library_options.thread_affinity", "library_options.ccl_bgt_affinity",
                 "library_options.mlsl_bgt_affinity")),
    HorovodFlag("gloo_timeout_seconds", "--gloo-timeout-seconds", _unused("GLOO_TIMEOUT_SECONDS"), Value.WHOLE,
                ("library_options.gloo_timeout_seconds",)),

    HorovodFlag("log_level", "--log-level", Sets(
        config.LOG_LEVEL, _level, "Output",
        "The level of log messages: DEBUG or TRACE is --verbose, and the events of all ranks."),
        Value.LEVEL, ("logging.level",), "LEVEL"),
    HorovodFlag("log_with_timestamp", "--log-with-timestamp / --log-without-timestamp", Sets(
        config.LOG_TIME, _on_or_off, "Output", "Begin log messages of the ranks with the date and time."),
        Value.SWITCH, ("logging.with_timestamp",)),
    HorovodFlag("log_hide_timestamp", "--log-hide-timestamp / --no-log-hide-timestamp", Sets(
        config.LOG_TIME, lambda hides: _on_or_off(not hides)), Value.SWITCH),
    HorovodFlag("prefix_output_with_timestamp", "-prefix-timestamp --prefix-output-with-timestamp", Same(),
                Value.SWITCH),

    HorovodFlag("hosts", "-H --hosts", Same()),
    HorovodFlag("hostfile", "-hostfile --hostfile", Same()),
    HorovodFlag("host_discovery_script", "--host-discovery-script", Same(
        "with --commit-dir it is run each second")),

    HorovodFlag("use_gloo", "--gloo", Sets(
        config.ENGINE, lambda _: "torch", "Engine", "Communicate through PyTorch's Gloo instead of MPI."),
        Value.SWITCH),
    HorovodFlag("use_mpi", "--mpi", Sets(
        config.ENGINE, lambda _: "mpi", "Engine", "Communicate through MPI, as without it."), Value.SWITCH),
    HorovodFlag("use_jsrun", "--jsrun", NoEffect(
        "mpirun starts the ranks, also within an allocation of LSF."), Value.SWITCH),
)
# fmt: on


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that the flags set for the ranks.

    Args:
        given: the values of flags, by ``dest``; ``None`` or a missing one was not given.

    Example:
        >>> variables({"autotune": True, "fusion_threshold_mb": 32, "log_level": "TRACE"})
        {'CHOROS_FUSION_BYTES': '33554432', 'CHOROS_AUTOTUNE': '1', 'CHOROS_LOG_LEVEL': 'DEBUG'}
    """
    wanted = {}
    for flag, value in _given(given):
        if isinstance(flag.does, Sets) and (text := flag.does.value(value)):
            wanted[flag.does.variable.name] = text
    return wanted


def check(given: Mapping[str, Any], has_torch: Callable[[], bool], *, in_python: bool = False) -> None:
    """Raises a ``ConfigError`` if a flag has an invalid value, or needs what is not installed.

    Args:
        given: the values of flags, by ``dest``; ``None`` or a missing one was not given.
        has_torch: returns whether the ranks have PyTorch.
        in_python: the flags are choros.run's arguments.
    """
    for flag, value in _given(given):
        spelled = flag.spelled(value, in_python=in_python)
        if not flag.accepts(value):
            raise ConfigError(f"{spelled} {value}: expected {flag.value.value}.")
    if given.get("use_gloo") and given.get("use_mpi"):
        raise ConfigError("Gloo and MPI are two engines: give only one of them.")
    if given.get("use_gloo") and not has_torch():
        raise ConfigError(
            f"{'use_gloo' if in_python else '--gloo'}: Gloo comes with PyTorch, which is not installed: pip install "
            "torch. Without it, ranks communicate through MPI."
        )


def unused(given: Mapping[str, Any], *, in_python: bool = False) -> list[str]:
    """Returns a sentence about the flags that are ``given`` and change nothing, one for each reason.

    Example:
        >>> unused({"cycle_time_ms": 2.5, "autotune": True})
        ['--cycle-time-ms has no effect: a collective starts when all ranks have called it, not in cycles.']
    """
    spelled: dict[str, list[str]] = {}
    for flag, value in _given(given):
        if isinstance(flag.does, NoEffect):
            spelled.setdefault(flag.does.reason, []).append(flag.spelled(value, in_python=in_python))
    return [f"{_listed(names)} no effect: {reason}" for reason, names in spelled.items()]


def _given(given: Mapping[str, Any]) -> Iterable[tuple[HorovodFlag, Any]]:
    """The flags that are given and are not chorosrun's own, with their values."""
    others = (flag for flag in HOROVOD_FLAGS if not isinstance(flag.does, Same))
    return [(flag, value) for flag in others if (value := given.get(flag.dest)) is not None]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} have" if len(names) > 1 else f"{names[0]} has"
