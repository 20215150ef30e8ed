"""The Python code of the pages, as the programs that the tests run."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_FRAMEWORK = re.compile(r"^(?:import|from) (tensorflow|torch|jax)\b", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """The blocks of a page, or of some of its sections, which two ranks run one after the other with the same names.

    A block that imports a framework runs on that one only.

    Attributes:
        page: below ``docs``.
        frameworks: what it runs on, each.
        without: headings of the sections that another program, or none, runs.
        names: Python code that defines what the page's fragments use.
        values: what stands for a ``...`` of the page, or for what a test cannot have.
    """

    page: str
    frameworks: Sequence[str]
    without: Sequence[str] = ()
    names: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


#: What the fragments of the pages about Keras use.
_KERAS = """
import choros
import choros.keras as hvd
import keras
import numpy as np
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)
def build_and_compile():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    return model
model = build_and_compile()
"""

_GRAPH = """
    loss = tf.reduce_sum((v1.get_variable("w", (3,)) - 1.0) ** 2)
    step = v1.train.get_or_create_global_step()
"""

PROGRAMS = (
    Program("distribute.md", ("tensorflow", "torch", "jax"), without=("Parameter servers",)),
    Program("faces.md", ("torch",)),
    Program(
        "index.md",
        ("torch",),
        names=_KERAS,
        values={"Sequential([...])": "Sequential([keras.Input((4,)), keras.layers.Dense(1)])", "=8)": "=1, verbose=0)"},
    ),
    Program("performance.md", ("torch",), values={"array[...] = ...": "array[...] = 1.0"}),
    Program(
        "torch.md",
        ("torch",),
        names="import torch; tensor = torch.ones(3)",
        values={
            "loss.backward()\noptimizer.synchronize()": (
                "optimizer.zero_grad()\nloss = loss_function(model(x), y)\nloss.backward()\noptimizer.synchronize()"
            ),
        },
    ),
    Program(
        "training.md",
        ("torch",),
        names=_KERAS + "latest_epoch_on_rank_0 = 0\n",
        values={
            "batch_size=12, ...)": "batch_size=12, verbose=0)",
            "model.fit(..., initial_epoch=epoch": "model.fit(x, y, verbose=0, initial_epoch=epoch",
            "Callback(0), ...]": "Callback(0)]",
        },
    ),
    Program(
        "compression.md",
        ("torch",),
        names=_KERAS
        + """
from choros.parallel.reduce.local_updates import LocalUpdates
from choros.parallel.reduce.local_updates import OuterSGD
weights, batches, examples = [np.ones(3, "float32")], [x[:8]] * 8, 0
""",
        values={"AdamW(1e-3), ...)": 'AdamW(1e-3), "mse")', ", ...])": "], shuffle=False, verbose=0)"},
    ),
    Program(
        "shard-state.md",
        ("torch",),
        names=_KERAS
        + """
import tempfile
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True), "mse")
model.fit(x, y, verbose=0)
file = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None) + "/checkpoint.keras"
if hvd.rank() == 0:
    model.save(file)
hvd.allreduce(0.0)
""",
        values={'"checkpoint.keras"': "file"},
    ),
    Program(
        "tensorflow.md",
        ("tensorflow",),
        values={
            "gradients = tape.gradient(loss, model.trainable_variables, examples": (
                "with tf.GradientTape() as tape:\n    loss = loss_function(y, model(x))\n"
                "tape = hvd.DistributedGradientTape(tape)\n"
                "gradients = tape.gradient(loss, model.trainable_variables, examples"
            ),
            "    step(x, y)\n": "    step(x, y, False)\n",
            "    ...\n": _GRAPH,
            "hooks=[": "hooks=[v1.train.StopAtStepHook(last_step=3), ",
        },
    ),
    Program(
        "timeline.md",
        ("torch",),
        names="""
import tempfile
import torch
import choros.torch as hvd
def train_for_ten_steps():
    hvd.allreduce(torch.ones(3))
""",
        values={'"run.json"': 'tempfile.mkdtemp() + "/run.json"'},
    ),
)

#: Pages and sections with Python code that no program here has, and why.
NOT_RUN = {
    "elastic.md": "parts of scripts; tests/elastic runs such scripts, and kills their ranks",
    "distribute.md#Parameter servers": "needs roles; test_a_cluster_in_one_process runs what is one process",
    "chorosrun.md": "starts a job of its own: test_functions_in_a_job",
    "notebooks.md": "functions of cells; tests/notebooks runs such cells in a kernel",
    "jax.md": "tests/jax_face runs its programs and fragments",
    "ray.md": "needs Ray; tests/ray_face trains as it does",
    "spark.md": "needs Java; tests/spark_face runs its programs",
}


def blocks(text: str, language: str = "python") -> list[tuple[str, str]]:
    """Returns the code of each block of a language, after the heading that it is below."""
    found = []
    for block in _BLOCK.finditer(text):
        if block[2] == language:
            headings = re.findall(r"^## (.+)$", text[: block.start()], re.MULTILINE)
            code = re.sub(rf"^{block[1]}", "", block[3], flags=re.MULTILINE)
            found.append((headings[-1] if headings else "", code))
    return found


def on(framework: str, codes: Sequence[str]) -> list[str]:
    """Returns those of ``codes`` that run on a framework."""
    return [code for code in codes if {framework}.issuperset(_FRAMEWORK.findall(code))]


def code_of(program: Program, framework: str) -> list[str]:
    """Returns the blocks of a program that run on a framework."""
    text = (DOCS / program.page).read_text()
    chosen = on(framework, [code for heading, code in blocks(text) if heading not in program.without])
    for old, new in program.values.items():
        chosen = [code.replace(old, new) for code in chosen]
    return chosen


def run(program: Program, framework: str) -> dict[str, Any]:
    """Runs a program in this process, and returns its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program.names, names)
    for number, code in enumerate(code_of(program, framework)):
        file = f"{program.page}, block {number}"
        # tf.function reads the source of what it decorates.
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        exec(compile(code, file, "exec"), names)
    return names
