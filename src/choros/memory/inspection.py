"""Finds out what a script, or a saved model, trains, in a process of its own, which is ended then."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from choros.bench.process_group import reason_in
from choros.errors import ChorosError, ConfigError
from choros.launch.processes.process_tree import die_with_parent, signal_group
from choros.memory.model import TrainedModel

#: How Keras' files end.
SAVED = ".keras"
#: Makes TensorFlow return what a step has needed to the system, so that the next step's need is seen.
_RELEASING = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}


def inspect_subject(path: Path, arguments: Sequence[str], batch: int | None) -> TrainedModel:
    """Returns what a script with ``arguments`` trains, or a saved model, which is itself trained on ``batch`` rows, if
    these are given; a ``ConfigError`` if it does not train, a ``ChorosError`` if it fails.
    """
    _check(path, arguments, batch)
    words = ("load_file", str(path), str(batch or 0)) if path.suffix == SAVED else ("run_script", str(path), *arguments)
    with tempfile.TemporaryDirectory(prefix="choros-memory-") as directory:
        file, log = Path(directory) / "findings.json", Path(directory) / "output"
        code = _run((sys.executable, "-m", "choros.memory.subject", str(file), *words), log)
        found = json.loads(file.read_text()) if file.exists() else {}
        if code != 0 and "error" not in found:
            reason = reason_in(log.read_text(errors="replace"), f"exit code {code}")
            raise ChorosError(f"{path} failed before it was measured: {reason}")
    if "model" not in found:
        raise ConfigError(found.get("error", f"{path} has ended its process without a training step."))
    return TrainedModel.from_json(found["model"])


def _check(path: Path, arguments: Sequence[str], batch: int | None) -> None:
    is_saved = path.suffix == SAVED
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file. Give a training script, or a model's {SAVED} file.")
    if not is_saved and path.suffix != ".py":
        raise ConfigError(f"{path}: expected a Python script (.py) or a model that Keras has saved ({SAVED}).")
    if not is_saved and batch is not None:
        raise ConfigError(f"--batch {batch}: only for a model's file. A script has its own batch size.")
    if is_saved and arguments:
        raise ConfigError(f"{' '.join(arguments)}: a model's file takes no arguments; a script does.")


def _run(command: tuple[str, ...], log: Path) -> int:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, **_RELEASING},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            return process.wait()
        finally:
            signal_group(process.pid, signal.SIGKILL)  # what a script has started, too
            process.wait()
