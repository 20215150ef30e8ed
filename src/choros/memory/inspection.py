"""Finds out what a script, or a saved model, trains, in a process of its own, which is ended then."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Subject:
    """What is inspected: a script and its arguments, or a saved model and the rows of a batch to train it with."""

    path: Path
    arguments: tuple[str, ...] = ()
    batch: int | None = None

    @property
    def is_saved(self) -> bool:
        """Whether it is a model's file."""
        return self.path.suffix == SAVED

    def check(self) -> None:
        """Raises a ``ConfigError`` if it cannot be inspected."""
        if not self.path.is_file():
            raise ConfigError(f"{self.path}: there is no such file. Give a training script, or a model's {SAVED} file.")
        if not self.is_saved and self.path.suffix != ".py":
            raise ConfigError(f"{self.path}: expected a Python script (.py) or a model that Keras has saved ({SAVED}).")
        if not self.is_saved and self.batch is not None:
            raise ConfigError(f"--batch {self.batch}: only for a model's file. A script has its own batch size.")
        if self.is_saved and self.arguments:
            raise ConfigError(f"{' '.join(self.arguments)}: a model's file takes no arguments; a script does.")

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of ``subject.py``."""
        if self.is_saved:
            return ("load_file", str(self.path), str(self.batch or 0))
        return ("run_script", str(self.path), *self.arguments)


def inspect_subject(subject: Subject) -> TrainedModel:
    """Returns what ``subject`` trains; a ``ConfigError`` if it does not train, a ``ChorosError`` if it fails."""
    with tempfile.TemporaryDirectory(prefix="choros-memory-") as directory:
        file, log = Path(directory) / "findings.json", Path(directory) / "output"
        code = _run((sys.executable, "-m", "choros.memory.subject", str(file), *subject.words), log)
        found = json.loads(file.read_text()) if file.exists() else {}
        if code != 0 and "error" not in found:
            reason = reason_in(log.read_text(errors="replace"), f"exit code {code}")
            raise ChorosError(f"{subject.path} failed before it was measured: {reason}")
    if "model" not in found:
        raise ConfigError(found.get("error", f"{subject.path} has ended its process without a training step."))
    return TrainedModel.from_json(found["model"])


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
