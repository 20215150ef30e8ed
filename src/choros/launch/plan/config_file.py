"""Horovod's configuration files: YAML with a section for each kind of flag.

::

    controller: mpi
    params:
      fusion_threshold_mb: 32
    stall_check:
      warning_time_seconds: 120
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from choros.errors import ConfigError
from choros.launch.plan.horovod_flags import HOROVOD_FLAGS

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
    names = list(valid)
    near = difflib.get_close_matches(str(name), names, 1)
    advice = f"Did you mean {near[0]}? " if near else ""
    return ConfigError(f"there is no {kind} {name!s}. {advice}It has {', '.join(names)}.")
