"""What ranks need in memory: for any number of them, of scripts, and of saved models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from choros.errors import ConfigError
from choros.memory.cli import as_json, memory, table
from choros.memory.model import (
    BY_ITEMS,
    BY_VARIABLES,
    UNDIVIDED,
    Need,
    TrainedModel,
    VariableBytes,
    first_fit,
    parse_memory,
    rank_bytes,
)
from harness import FRAMEWORKS, Job, check_case, needs, on_frameworks
from launch.launched import HIDDEN, run
from ranks.environment import QUICK, hiding_path

#: Two variables of Adam's in float32.
ADAM = TrainedModel("Adam", (VariableBytes(1000, 4000, 8000), VariableBytes(8, 32, 64)), BY_ITEMS, 12, 100, 5000, 70)


def need(ranks: int, shard_state: bool, *sizes: int) -> Need:
    """What a rank needs; the sum of all sizes is in it, too."""
    names = ("weights", "gradients", "state", "buffers", "activations", "total")
    return {"ranks": ranks, "shard_state": shard_state, **dict(zip(names, (*sizes, sum(sizes)), strict=True))}


def test_without_slices_each_rank_needs_the_same() -> None:
    for ranks in (1, 64):
        assert rank_bytes(ADAM, ranks, shard_state=False) == need(ranks, False, 4032, 4032, 8076, 100, 5000)


def test_slices_of_items() -> None:
    assert rank_bytes(ADAM, 1, shard_state=True) == need(1, True, 4032, 4032, 8076, 100, 5000)
    assert rank_bytes(ADAM, 4, shard_state=True) == need(4, True, 4032, 4032, 2016 + 12, 100, 5000)
    assert rank_bytes(ADAM, 3, shard_state=True)["state"] == 2688 + 12
    assert rank_bytes(ADAM, 4, shard_state=True)["total"] == 4032 + 4032 + 2028 + 100 + 5000


def test_adam_needs_eight_bytes_and_eight_for_all_ranks() -> None:
    one = TrainedModel("Adam", (VariableBytes(10**6, 4 * 10**6, 8 * 10**6),), BY_ITEMS)
    assert [rank_bytes(one, ranks, shard_state=True)["total"] for ranks in (1, 2, 4, 8)] == [
        16_000_000,
        12_000_000,
        10_000_000,
        9_000_000,
    ]


def test_slices_of_whole_variables() -> None:
    variables = tuple(VariableBytes(items, 4 * items, 10 * items) for items in (50, 30, 20))
    lamb = TrainedModel("Lamb", variables, BY_VARIABLES, 12)
    assert [rank_bytes(lamb, ranks, shard_state=True)["state"] for ranks in (1, 2, 3, 64)] == [1012, 512, 512, 512]


def test_what_is_not_divided_stays() -> None:
    several = TrainedModel("Adam, Adam", (VariableBytes(10, 40, 0),), UNDIVIDED, 80)
    assert [rank_bytes(several, ranks, shard_state=True)["state"] for ranks in (1, 8)] == [80, 80]
    assert rank_bytes(TrainedModel("SGD", (), BY_VARIABLES), 4, shard_state=True)["total"] == 0


def test_the_first_that_fits() -> None:
    needs = [rank_bytes(ADAM, ranks, shard_state=True) for ranks in (1, 2, 4)]
    assert [first_fit(needs, needs[index]["total"]) for index in range(3)] == [1, 2, 4]
    assert first_fit(needs, needs[2]["total"] - 1) is None


@pytest.mark.parametrize(
    ("text", "size"), [("24GB", 24 * 10**9), ("24GiB", 24 << 30), ("80G", 80 * 10**9), ("1.5kib", 1536), ("7 b", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "24", "GB", "24XB", "-1GB", "0GB", "24GB,"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size of memory, such as 24GB, 24GiB or 80G"):
        parse_memory(text)


def test_a_model_survives_json() -> None:
    assert TrainedModel.from_json(json.loads(json.dumps(asdict(ADAM)))) == ADAM


def needs_of(model: TrainedModel, numbers: tuple[int, ...]) -> list[list[Need]]:
    """What ranks need on each number of them, without and with ``shard_state``."""
    return [[rank_bytes(model, ranks, shard_state=way) for ranks in numbers] for way in (False, True)]


def test_the_table() -> None:
    without, sliced = needs_of(ADAM, (1, 2, 4))
    found = table("train.py", ADAM, without, sliced, "15.5kB", 15_500)
    assert found.columns == ["", "weights", "gradients", "state", "buffers", "activations", "a rank", "fits 15.5kB"]
    (_, rows), (_, rows_of_slices) = found.sections
    cells = ["3.94 KiB", "3.94 KiB", "7.89 KiB", "100 B", "4.88 KiB", "20.7 KiB", "no"]
    assert rows == [["any number of ranks", *cells]]
    assert [row[0] for row in rows_of_slices] == ["1 rank", "2 ranks", "4 ranks"]
    assert [row[-1] for row in rows_of_slices] == ["no", "no", "yes"]
    assert found.notes[-1] == "It fits 15.5kB with shard_state from 4 ranks on; never without."
    written = as_json(ADAM, without, sliced, 15_500)
    assert written["first_that_fits"] == {"without_shard_state": None, "with_shard_state": 4}
    assert [need["ranks"] for need in written["needs"]] == [1, 2, 4, 1, 2, 4]


def test_what_the_table_says_of_its_figures() -> None:
    def notes(model: TrainedModel, limit: int) -> str:
        return "\n".join(table("", model, *needs_of(model, (1, 2)), "it", limit).notes)

    bare = TrainedModel("Muon", (VariableBytes(1, 4, 4),), BY_VARIABLES, assumed=True)
    assert "The file has no optimizer: the state is that of Adam." in notes(bare, 100)
    assert "Muon needs whole variables" in notes(bare, 100)
    assert "activations were not measured" in notes(bare, 100)
    assert "It fits it without shard_state, on any number of ranks." in notes(bare, 100)
    assert "It does not fit it on any of these numbers of ranks." in notes(bare, 1)
    assert "shard_state does not divide the state of" in notes(TrainedModel("Own", (), UNDIVIDED), 1)
    assert "Not in the sum: 70 B of the process" in notes(ADAM, 1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("missing.py", "missing.py: there is no such file. Give a training script"),
        ("notes.txt", "expected a Python script"),
        ("train.py --np 0", "--np 0: expected positive whole numbers"),
        ("train.py --fit 24", "--fit 24: expected a size of memory"),
        ("train.py --batch 8", "--batch 8: only for a model's file"),
        ("model.keras -- --lr 1", "a model's file takes no arguments"),
        ("train.py --json /no/such/place", "cannot be written"),
    ],
)
def test_invalid_arguments(given: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "train.py", "model.keras"):
        Path(name).write_text("")
    with pytest.raises(ConfigError, match=problem) as caught:
        CliRunner().invoke(memory, given.split(), catch_exceptions=False)
    assert caught.value.exit_code == 2


@on_frameworks("memory.object_cases")
def test_what_objects_have(case: str, job: Job) -> None:
    check_case("memory.object_cases", case, job)


# scripts and files ------------------------------------------------------------------------------

SCRIPT = """
import sys, numpy, keras
import choros.keras as hvd
hvd.init()
print("its own output")
units = int(sys.argv[1])
hidden = [keras.layers.Dense(units, "relu", use_bias=False) for _ in range(2)]
model = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True), "mse")
rows = numpy.ones((4096 * 5, 4), "float32")
model.fit(rows, rows[:, :1], batch_size=4096, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
open("reached", "w").close()
"""
TWO_OPTIMIZERS = """
import keras, numpy
class Two(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer, self.first, self.second = keras.layers.Dense(4), keras.optimizers.Adam(), keras.optimizers.SGD()
    def call(self, rows):
        return self.layer(rows)
    def train_step(self, data):
        kernel, bias = self.layer.trainable_variables
        self.first.apply([keras.ops.ones_like(kernel)], [kernel])
        self.second.apply([keras.ops.ones_like(bias)], [bias])
        return {}
model = Two()
model.compile()
model.fit(numpy.ones((8, 4), "float32"), batch_size=4)
"""
SAVING = """
import sys, keras
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(1)])
if sys.argv[1] == "compiled":
    model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
model.save(sys.argv[1] + ".keras")
tokens, numbers = keras.Input((6,), dtype="int32", name="tokens"), keras.Input((3,), name="numbers")
parts = [keras.layers.Flatten()(keras.layers.Embedding(9, 4)(tokens)), keras.layers.Dense(5)(numbers)]
both = keras.layers.Concatenate()(parts)
outputs = {"a": keras.layers.Dense(1)(both), "b": keras.layers.Dense(2)(both)}
keras.Model({"tokens": tokens, "numbers": numbers}, outputs).save("several.keras")
keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(1)]).save("any.keras")
"""


def environ(framework: str) -> dict[str, str]:
    path = hiding_path(*HIDDEN[framework])
    return {**os.environ, **QUICK, "KERAS_BACKEND": framework, "PYTHONPATH": path}


def choros_memory(*words: str, cwd: Path, framework: str = FRAMEWORKS[0]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "choros", "memory", *words]
    return subprocess.run(command, cwd=cwd, env=environ(framework), capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_script_is_measured_and_ended(framework: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("train.py", "--np", "1,2", "--fit", "1TB", "--json", "out.json", "--", "512")
    done = choros_memory(*words, cwd=tmp_path, framework=framework)
    assert done.returncode == 0, done.stderr
    assert "its own output" not in done.stdout
    assert "It fits 1TB without shard_state, on any number of ranks." in done.stdout
    assert not (tmp_path / "reached").exists()
    written = json.loads((tmp_path / "out.json").read_text())
    parameters = 4 * 512 + 512 * 512 + 512 + 1
    assert (written["optimizer"], written["parameters"]) == ("Adam", parameters)
    whole, _, one, two = written["needs"]
    assert whole["weights"] == whole["gradients"] == 4 * parameters
    assert 8 * parameters <= whole["state"] == one["state"] <= 8 * parameters + 64
    assert two["state"] - 4 * parameters <= 64
    # Gradients need the outputs of both hidden layers for each row; batches, which come and go, are small.
    assert whole["activations"] >= 4096 * 512 * 4
    assert written["rest"] > 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "problem"),
    [
        ("print('nothing')", 2, "train.py has ended without a training step. Expected a script whose Keras model"),
        ("import sys; sys.exit()", 2, "train.py has ended without a training step."),
        ("import os; os._exit(0)", 2, "train.py has ended its process without a training step."),
        ("1 / 0", 1, "train.py failed before it was measured: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit('no data')", 1, "train.py failed before it was measured: no data"),
    ],
)
def test_a_script_that_does_not_train(script: str, code: int, problem: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    done = choros_memory("train.py", "--np", "2", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_nothing_is_imported_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "choros.py").write_text("raise SystemExit('a module of another user')")
    script = tmp_path / "own" / "train.py"
    script.parent.mkdir()
    script.write_text("import beside")
    (script.parent / "beside.py").write_text("raise SystemExit('the script has begun')")
    done = choros_memory(str(script), "--np", "2", cwd=tmp_path)
    assert "the script has begun" in done.stderr, done.stderr


@pytest.mark.slow
@needs("torch")
def test_a_model_with_optimizers_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_OPTIMIZERS)
    words = ("train.py", "--np", "2", "--json", "out.json")
    done = choros_memory(*words, cwd=tmp_path, framework="torch")
    assert done.returncode == 0, done.stderr
    assert "shard_state does not divide the state of Adam, SGD: each rank has all of it." in done.stdout
    assert "activations were not measured" in done.stdout
    without, sliced = json.loads((tmp_path / "out.json").read_text())["needs"]
    assert without["weights"] == 4 * 20
    assert without["state"] == sliced["state"] >= 2 * 4 * 16


@pytest.mark.slow
def test_a_saved_model(tmp_path: Path) -> None:
    (tmp_path / "save.py").write_text(SAVING)
    for name in ("compiled", "bare"):
        command = [sys.executable, "save.py", name]
        subprocess.run(command, cwd=tmp_path, env=environ(FRAMEWORKS[0]), check=True, timeout=300)
    (tmp_path / "no.keras").write_text("no model")
    compiled = choros_memory("compiled.keras", "--np", "1,2", "--json", "out.json", cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    need, *_ = json.loads((tmp_path / "out.json").read_text())["needs"]
    assert (need["weights"], need["activations"]) == (4 * 145, None)
    assert 4 * 145 <= need["state"] <= 4 * 145 + 32
    bare = choros_memory("bare.keras", "--batch", "32", cwd=tmp_path)
    assert bare.returncode == 0, bare.stderr
    assert "The file has no optimizer: the state is that of Adam." in bare.stdout
    assert "activations: what a step needs besides, measured" in bare.stdout
    several = choros_memory("several.keras", "--batch", "8", "--np", "1", "--json", "out.json", cwd=tmp_path)
    assert several.returncode == 0, several.stderr
    assert json.loads((tmp_path / "out.json").read_text())["needs"][0]["activations"] is not None
    unknown = choros_memory("any.keras", "--batch", "8", cwd=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "has the shape (None, None, 3), but rows can be made only of a known one" in unknown.stderr
    broken = choros_memory("no.keras", cwd=tmp_path)
    assert (broken.returncode, broken.stdout) == (2, "")
    assert "no.keras cannot be loaded as a model of Keras" in broken.stderr


TRAINS = """
import keras, numpy as np, torch
import choros.keras, choros.torch as hvd

hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1024, use_bias=False)])
model.compile(choros.keras.DistributedOptimizer(keras.optimizers.Adam(), shard_state=True), "mse")
model.fit(np.ones((4, 1024)), np.ones((4, 1024)), verbose=0)
layer = torch.nn.Linear(1024, 1024, bias=False)
for shard_state in (False, True):
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(layer.parameters()), shard_state=shard_state)
    layer(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@needs("mpi4py")
@pytest.mark.timeout(120)
def test_verbose_says_once_what_a_rank_has() -> None:
    ended = run("-np", 2, "--verbose", sys.executable, "-c", TRAINS, env={"KERAS_BACKEND": "torch"}, warm=True)
    assert ended.code == 0, ended.err
    said = re.findall("memory of a rank: 4 MiB of weights, 4 MiB of gradients, (.*)[.]", ended.out + ended.err)
    sliced = "4 MiB of 8 MiB of the state of Adam (shard_state)"
    assert said == [sliced, "8 MiB of the state of Adam; with shard_state about 4 MiB", sliced]
