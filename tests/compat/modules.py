"""Prints what is missing or different in the installed compat/horovod: ``python modules.py torch|tensorflow``."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
#: Whose import is an error that says what to use instead.
ABSENT = {
    "torch": ["data", "mxnet"],
    "tensorflow": ["tensorflow.data", "tensorflow.data.compute_service"],
}
HAVE_FACE = {"torch": ["torch"], "tensorflow": ["tensorflow", "keras"]}


def problems(framework: str) -> Iterator[str]:
    """Yields them for the modules that do not import the other framework."""
    for table in sorted((HERE.parent / "horovod_names").glob("*.toml")):
        text = table.read_text()
        content = tomllib.loads(text)
        if content["face"].split(".")[1] in HAVE_FACE[framework]:
            original = re.findall(r"names of ([\w.]+) in", text)[0]
            names = (content["signatures"].keys() | content["values"].keys()) - content.get("absent", {}).keys()
            yield from differences(original, content["face"], names)
    for module, names in tomllib.loads((HERE / "modules.toml").read_text())[framework].items():
        for name in names.split():
            if not hasattr(importlib.import_module(module), name):
                yield f"{module} has no {name}"
    for name in ABSENT[framework]:
        try:
            importlib.import_module(f"horovod.{name}")
        except ImportError as error:
            if "is not part of choros: " not in str(error):
                yield f"horovod.{name}: {error}"
        else:
            yield f"horovod.{name} can be imported"
    mpi_ops = importlib.import_module(f"horovod.{framework}.mpi_ops")
    mpi_ops.init()
    if framework == "torch":
        torch, module = importlib.import_module("torch"), importlib.import_module("horovod.torch.optimizer")
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        if not isinstance(module.DistributedOptimizer(optimizer), module._DistributedOptimizer):
            yield "horovod.torch.optimizer._DistributedOptimizer is no class of distributed optimizers"
    if mpi_ops._basics._get_process_set_ids_and_ranks() != {0: [0]}:
        yield f"horovod.{framework}.mpi_ops._basics knows other process sets"
    if os.environ["CHOROS_DIVERGENCE"] != "warn":
        yield "ranks that differ do not go on"
    if framework == "tensorflow":
        yield from keras_2_problems()


def differences(original: str, face: str, names: set[str]) -> Iterator[str]:
    """Yields names that are not the same object in both modules."""
    ours, theirs = importlib.import_module(face), importlib.import_module(original)
    for name in {name.partition(".")[0] for name in names}:
        if getattr(ours, name) is not getattr(theirs, name, None) and name != "callbacks":
            yield f"{original}.{name} is not {face}'s"


def keras_2_problems() -> Iterator[str]:
    """Yields whether a model is not as before, which uses what Keras 3 has dropped."""
    import keras

    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", experimental_run_tf_function=False)
    if not model.optimizer.variables() == model.optimizer.variables == model.optimizer.variables[:]:
        yield "variables() are not those of the optimizer"
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    scaled.build(model.trainable_variables)
    if scaled.variables() != scaled.variables or len(scaled.variables()) <= len(scaled.inner_optimizer.variables()):
        yield "variables() of a LossScaleOptimizer are not its own"
    scaled.lr = 0.25
    if float(scaled.inner_optimizer.lr) != 0.25:
        yield "lr is not settable"
    scaled.lr.assign(0.5)
    if float(scaled.learning_rate) != 0.5:
        yield "lr is not the learning rate"
    keras.backend.set_value(scaled.lr, 0.75)
    if float(scaled.lr) != 0.75:
        yield "set_value() does not set lr"
    from horovod import tensorflow as hvd

    if not (hvd._executing_eagerly() and hvd.util._executing_eagerly()):
        yield "_executing_eagerly() is not true here"
    if {variable.ref(): variable for variable in model.variables}[model.variables[0].ref()] is not model.variables[0]:
        yield "ref() is no key"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras warns if compile is not its own
        model.compile_from_config(model.get_compile_config())


if __name__ == "__main__":
    for problem in problems(sys.argv[1]):
        print(problem)
    import horovod.common.util

    failed, attempted = doctest.testmod(horovod.common.util)
    if failed or not attempted:
        print("examples of horovod.common.util")
