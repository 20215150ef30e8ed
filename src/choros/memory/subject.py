"""The process that trains what ``choros memory`` is asked about, and writes to a file what it has found.

::

    step 1   compiles, creates the optimizer's state ──► what objects have is written
    step 2   all that a step leaves behind is there; memory that is free goes back to the system
             └─ what is resident now ─────────────────┐
    step 3   computes                                 │
             └─ the most that was resident in it ─────┴► their difference is written; the process ends
"""

import ctypes
import functools
import gc
import importlib.util
import inspect
import json
import os
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, final

from choros.durable import unfinished
from choros.errors import ConfigError
from choros.memory.model import TrainedModel
from choros.observe.processes import peak_bytes, reset_peak, resident_bytes

#: The steps whose memory counts as that of the first ones, and the step that is measured.
_SETTLED, _MEASURED = 2, 3


def write_findings(file: Path, **found: object) -> None:
    """Writes what is known so far: a ``model``, or the ``error`` that says why there is none."""
    with unfinished(file) as name:
        name.write_text(json.dumps(found))


@final
class StepMeter:
    """Measures the steps of the first model that is trained, and ends the process after the last one of interest."""

    def __init__(self, findings: Path, *, assumed: bool = False) -> None:
        self._findings = findings
        self._assumed = assumed
        self._model: Any = None
        self._found: TrainedModel | None = None
        self._steps = 0
        self._before: int | None = None

    def step_done(self, model: Any) -> None:
        """A step of ``model`` has ended."""
        if self._model is not None and model is not self._model:
            return
        self._model = model
        self._steps += 1
        if self._steps == 1:
            self._found = replace(_trained(model), assumed=self._assumed)
            write_findings(self._findings, model=asdict(self._found))
        elif self._steps == _SETTLED:
            self._before = _settled_bytes()
        elif self._steps == _MEASURED and self._found is not None:
            self._finish(self._found, peak_bytes())

    def _finish(self, found: TrainedModel, peak: int) -> None:
        before = self._before
        if before is not None:
            gradients = sum(each.nbytes for each in found.variables)
            kept = _gradients_kept(self._model)  # which the step before has left, so that they are no difference
            known = gradients + sum(each.state for each in found.variables) + found.shared_state + found.buffers
            found = replace(
                found, activations=max(0, peak - before - (gradients - kept)), rest=max(0, before - known - kept)
            )
        write_findings(self._findings, model=asdict(found))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what a script does after training, such as saving, is not done


def _trained(model: Any) -> TrainedModel:
    from choros.memory.objects import trained_model, used_optimizer

    if hasattr(model, "jax_state_sync"):  # during an epoch, variables have no values
        model.jax_state_sync()
    return trained_model(model, used_optimizer(model))


def _settled_bytes() -> int | None:
    """What is resident without memory that is free; ``None`` if that cannot be compared with the next step's peak."""
    from choros.training.device import accelerated

    if accelerated():  # what a step needs is elsewhere
        return None
    gc.collect()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's
    return resident_bytes() if reset_peak() else None


def _gradients_kept(model: Any) -> int:
    """The bytes of gradients that are alive between steps: PyTorch's."""
    import keras

    variables = model.trainable_variables if keras.backend.backend() == "torch" else ()
    gradients = [getattr(variable.value, "grad", None) for variable in variables]
    return sum(each.nbytes for each in gradients if each is not None)


def _after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Calls ``then`` with the module ``name`` when it has been imported: the script chooses Keras' framework first."""

    def find_spec(fullname: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if fullname != name:
            return None
        sys.meta_path.remove(finder)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            own = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                own(module)
                then(module)

            loader.exec_module = exec_module
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)


def _watch(keras: Any, meter: StepMeter) -> None:
    """Makes ``fit`` of all models report their steps."""
    own = keras.Model.fit

    @functools.wraps(own)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(own).bind(self, *args, **kwargs)

        def step_done(batch: int, logs: Any = None) -> None:
            del batch, logs  # Keras names its arguments
            meter.step_done(self)

        meters = keras.callbacks.LambdaCallback(on_train_batch_end=step_done)
        given = call.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(meters)
        else:
            each = list(given) if isinstance(given, (list, tuple)) else [given]
            call.arguments["callbacks"] = [*(callback for callback in each if callback is not None), meters]
        return own(*call.args, **call.kwargs)

    keras.Model.fit = fit


def run_script(findings: Path, script: str, *arguments: str) -> None:
    """Runs the script as Python does, until the step that is measured."""
    meter = StepMeter(findings)
    _after_import("keras", lambda keras: _watch(keras, meter))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if not findings.exists():
        raise ConfigError(
            f"{script} has ended without a training step. Expected a script whose Keras model trains by fit(), on one "
            "process, too."
        )


def load_file(findings: Path, file: str, batch: str) -> None:
    """Loads a model that Keras has saved, and trains it on ``batch`` rows of random numbers; ``0``: it does not."""
    import keras

    try:
        model = keras.saving.load_model(file)
    except Exception as error:  # whatever a file has that is no model
        raise ConfigError(f"{file} cannot be loaded as a model of Keras: {error}") from error
    given = getattr(model, "optimizer", None)
    optimizer = given or keras.optimizers.Adam()
    if not model.built:
        raise ConfigError(f"{file} has no weights yet: build the model, or train it, before it is saved.")
    from choros.memory.objects import trained_model

    write_findings(findings, model=asdict(replace(trained_model(model, optimizer), assumed=given is None)))
    if int(batch):
        _train(model, optimizer, int(batch), StepMeter(findings, assumed=given is None))


def _train(model: Any, optimizer: Any, batch: int, meter: StepMeter) -> None:
    """Makes steps on random rows, with the mean squares of all outputs as loss: no labels are needed."""
    import keras
    import numpy as np

    generator = np.random.default_rng(0)

    def rows(tensor: Any) -> Any:
        shape = (batch, *tensor.shape[1:])
        if None in shape:
            raise ConfigError(
                f"--batch {batch}: the model's input {tensor.name!r} has the shape {tensor.shape}, but rows can be "
                "made only of a known one. Leave --batch out, or give a script that trains the model."
            )
        floating = "float" in keras.backend.standardize_dtype(tensor.dtype)
        return (generator.random(shape) if floating else np.zeros(shape)).astype(tensor.dtype)

    def compute_loss(_rows: Any, _labels: Any, y_pred: Any, *_others: Any, **_named: Any) -> Any:
        outputs = (keras.ops.cast(each, "float32") for each in keras.tree.flatten(y_pred))
        return sum(keras.ops.mean(keras.ops.square(each)) for each in outputs)

    try:
        symbolic = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    except AttributeError as error:
        raise ConfigError(
            f"--batch {batch}: only for models whose inputs are known, which are Sequential or of the functional API. "
            "Leave --batch out, or give a script that trains the model."
        ) from error
    inputs = keras.tree.map_structure(rows, symbolic)
    model.compile(type(optimizer).from_config(optimizer.get_config()))
    object.__setattr__(model, "compute_loss", compute_loss)  # past Keras' tracking of attributes
    _watch(keras, meter)
    model.fit(inputs, batch_size=batch, epochs=_MEASURED, shuffle=False, verbose=0)


def main(file: str, what: str, *words: str) -> None:
    """Runs ``what``, which is ``run_script`` or ``load_file``, and leaves its findings in ``file``."""
    findings = Path(file)
    try:
        {each.__name__: each for each in (run_script, load_file)}[what](findings, *words)
    except ConfigError as error:
        write_findings(findings, error=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
