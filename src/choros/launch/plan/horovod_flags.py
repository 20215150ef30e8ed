"""The flags that set a variable of ``settings.py`` for the ranks, or, as horovodrun has them, change nothing: a line on
standard error says why. The others are in ``arguments.py``. Horovod's configuration files, YAML with a section for each
kind of flag, have the same values under ``section.key``:

::

    controller: mpi
    params:
      fusion_threshold_mb: 32
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from choros.errors import ConfigError
from choros.launch.plan.flags import (
    LEVEL,
    NUMBER,
    SHARE,
    SWITCH,
    WHOLE,
    Flag,
    Value,
    flag_of,
    given_of,
    on_or_off,
    variables_of,
)
from choros.settings import HOROVOD_UNUSED, VARIABLES


def _flag(group: str, names: str, **rest: Any) -> Flag:
    return Flag(group, names, horovod="", **rest)


def _unused(names: str, variable: str, value: Value, *keys: str) -> Flag:
    """A flag whose variable changes nothing."""
    return _flag("", names, value=value, keys=keys, no_effect=HOROVOD_UNUSED[f"HOROVOD_{variable}"])


# fmt: off
HOROVOD_FLAGS: tuple[Flag, ...] = (
    _flag("", "--disable-cache", value=SWITCH,
        no_effect="chorosrun checks the hosts at every start and caches nothing."),

    _flag("Tuning", "--fusion-threshold-mb", value=WHOLE, metavar="MiB",
        help="The size of the messages in which gradients are reduced; 0: each gradient on its own. Default: 4, which "
        "fits the caches.",
        variable=VARIABLES["fusion_bytes"], text=lambda megabytes: str(megabytes << 20),
        keys=("params.fusion_threshold_mb",)),
    _unused("--cycle-time-ms", "CYCLE_TIME", NUMBER, "params.cycle_time_ms"),
    _unused("--cache-capacity", "CACHE_CAPACITY", WHOLE, "params.cache_capacity"),
    _unused("--hierarchical-allreduce / --no-hierarchical-allreduce",
        "HIERARCHICAL_ALLREDUCE", SWITCH, "params.hierarchical_allreduce"),
    _unused("--hierarchical-allgather / --no-hierarchical-allgather",
        "HIERARCHICAL_ALLGATHER", SWITCH, "params.hierarchical_allgather"),
    _unused("--torus-allreduce / --no-torus-allreduce", "TORUS_ALLREDUCE", SWITCH, "params.torus_allreduce"),

    *(flag_of(variable) for variable in VARIABLES.values() if variable.flag),

    _unused("--autotune-warmup-samples", "AUTOTUNE_WARMUP_SAMPLES", WHOLE, "autotune.warmup_samples"),
    _unused("--autotune-steps-per-sample", "AUTOTUNE_STEPS_PER_SAMPLE", WHOLE, "autotune.steps_per_sample"),
    _unused("--autotune-bayes-opt-max-samples", "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        WHOLE, "autotune.bayes_opt_max_samples"),
    _unused("--autotune-gaussian-process-noise", "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        SHARE, "autotune.gaussian_process_noise"),

    _flag("Waiting", "--stall-check / --no-stall-check", value=SWITCH,
        help="Name the ranks that wait, and those that they wait for, after --stall-check-warning-time-seconds.",
        variable=VARIABLES["stall_seconds"], text=lambda checks: "" if checks else "0", keys=("stall_check.enabled",)),

    _unused("--mpi-threads-disable / --no-mpi-threads-disable", "MPI_THREADS_DISABLE", SWITCH,
        "library_options.mpi_threads_disable"),
    _unused("--num-nccl-streams", "NUM_NCCL_STREAMS", WHOLE, "library_options.num_nccl_streams"),
    _unused("--thread-affinity", "THREAD_AFFINITY", WHOLE, "library_options.thread_affinity",
        "library_options.ccl_bgt_affinity", "library_options.mlsl_bgt_affinity"),
    _unused("--gloo-timeout-seconds", "GLOO_TIMEOUT_SECONDS", WHOLE, "library_options.gloo_timeout_seconds"),

    _flag("Output", "--log-level", value=LEVEL, metavar="LEVEL",
        help="The level of log messages: DEBUG or TRACE is --verbose, and the events of all ranks.",
        variable=VARIABLES["log_level"], text=lambda level: VARIABLES["log_level"].read({"HOROVOD_LOG_LEVEL": level}),
        keys=("logging.level",)),
    _flag("", "--log-hide-timestamp / --no-log-hide-timestamp", value=SWITCH,
        variable=VARIABLES["log_time"], text=lambda hides: on_or_off(not hides)),

    _flag("Engine", "--gloo", argument="use_gloo", value=SWITCH,
        help="Communicate through PyTorch's Gloo instead of MPI.",
        variable=VARIABLES["engine"], text=lambda _: "torch"),
    _flag("Engine", "--mpi", argument="use_mpi", value=SWITCH, help="Communicate through MPI, as without it.",
        variable=VARIABLES["engine"], text=lambda _: "mpi"),
    _flag("", "--jsrun", argument="use_jsrun", value=SWITCH,
        no_effect="mpirun starts the ranks, also within an allocation of LSF."),
)
# fmt: on


def variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that the flags set for the ranks; of ``given``, by ``dest``, ``None`` was not given.

    >>> variables({"autotune": True, "fusion_threshold_mb": 32, "log_level": "TRACE"})
    {'CHOROS_FUSION_BYTES': '33554432', 'CHOROS_AUTOTUNE': '1', 'CHOROS_LOG_LEVEL': 'DEBUG'}
    """
    return variables_of(HOROVOD_FLAGS, given)


def check(given: Mapping[str, Any], has_torch: Callable[[], bool], *, in_python: bool = False) -> None:
    """Raises a ``ConfigError`` if a flag has an invalid value, or needs PyTorch, which is not installed."""
    for flag, value in given_of(HOROVOD_FLAGS, given):
        flag.check(value, in_python=in_python)
    if given.get("use_gloo") and given.get("use_mpi"):
        raise ConfigError("Gloo and MPI are two engines: give only one of them.")
    if given.get("use_gloo") and not has_torch():
        raise ConfigError(
            f"{'use_gloo' if in_python else '--gloo'}: Gloo comes with PyTorch, which is not installed: pip install "
            "torch. Without it, ranks communicate through MPI."
        )


def unused(given: Mapping[str, Any], *, in_python: bool = False) -> list[str]:
    """Returns a sentence about the flags that are ``given`` and change nothing, one for each reason.

    >>> unused({"cycle_time_ms": 2.5, "autotune": True})
    ['--cycle-time-ms has no effect: a collective starts when all ranks have called it, not in cycles.']
    """
    spelled: dict[str, list[str]] = {}
    for flag, value in given_of(HOROVOD_FLAGS, given):
        if flag.no_effect:
            spelled.setdefault(flag.no_effect, []).append(flag.spelled(value, in_python=in_python))
    return [f"{_listed(names)} no effect: {reason}" for reason, names in spelled.items()]


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} have" if len(names) > 1 else f"{names[0]} has"


_CONTROLLER = "controller"
_CONTROLLERS = {"gloo": "use_gloo", "mpi": "use_mpi"}
_FLAGS = {key: flag for flag in HOROVOD_FLAGS for key in flag.keys}
_SECTIONS = tuple(dict.fromkeys(key.partition(".")[0] for key in _FLAGS))


def read_config_file(path: Path) -> dict[str, Any]:
    """Returns the values of a file's flags, by ``Flag.dest``; a ``ConfigError`` for unknown keys and values."""
    import yaml  # takes 15 ms; only this flag needs it

    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config-file {path}: it cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file {path}: it is not a YAML file: {' '.join(str(error).split())}.") from error
    try:
        return parse_config(document)
    except ConfigError as error:
        raise ConfigError(f"--config-file {path}: {error}") from None


def parse_config(document: object) -> dict[str, Any]:
    """Returns the values of the flags in a parsed file; empty values are not given.

    >>> parse_config({"controller": "Gloo", "params": {"cycle_time_ms": 2.5}, "timeline": None})
    {'use_gloo': True, 'cycle_time_ms': 2.5}
    """
    values: dict[str, Any] = {}
    for section, content in _mapping(document, "the file").items():
        if content is None:
            continue
        if section == _CONTROLLER:
            if str(content).casefold() not in _CONTROLLERS:
                raise ConfigError(f"{_CONTROLLER}: {content!r} is not one of {', '.join(_CONTROLLERS)}.")
            values[_CONTROLLERS[str(content).casefold()]] = True
            continue
        if section not in _SECTIONS:
            raise _unknown(section, "section", [_CONTROLLER, *_SECTIONS])
        for name, value in _mapping(content, f"section {section}").items():
            key = f"{section}.{name}"
            if key not in _FLAGS:
                raise _unknown(key, "key", [each for each in _FLAGS if each.startswith(f"{section}.")])
            flag = _FLAGS[key]
            if value is not None:
                if value not in flag.value:
                    raise ConfigError(f"{key}: {value!r} is not {flag.value}.")
                values[flag.dest] = value
    return values


def with_config(given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of flags on the command line, and those of a file for flags that are not given there.

    >>> with_config({"autotune": None, "use_gloo": True, "env": ()}, {"autotune": True, "use_mpi": True})
    {'autotune': True, 'use_gloo': True, 'env': ()}
    """
    controllers = _CONTROLLERS.values()
    chosen = any(given.get(name) for name in controllers)
    new = {
        name: value
        for name, value in config.items()
        if given.get(name) is None and not (chosen and name in controllers)
    }
    return {**given, **new}


def _mapping(value: object, what: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {value!r}; expected keys and values, as in `params: {{cycle_time_ms: 1}}`.")
    return value


def _unknown(name: object, kind: str, valid: Iterable[str]) -> ConfigError:
    import difflib  # only errors need it

    names = list(valid)
    near = difflib.get_close_matches(str(name), names, 1)
    advice = f"Did you mean {near[0]}? " if near else ""
    return ConfigError(f"there is no {kind} {name!s}. {advice}It has {', '.join(names)}.")
