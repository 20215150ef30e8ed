"""Jobs that another launcher starts again: they go on from the last commit. Real processes, SIGKILL."""

import os
import re
import subprocess
import sys

import pytest

from harness import needs
from launch.launched import run
from warm.servers import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs("torch"), needs("keras")]

#: Weight i counts how often row i was trained on. In step 20 of the first start, in the second epoch, rank 1 dies.
SCRIPT = """
import os, signal
import keras, numpy as np
import choros.distribute as dist

ROWS = 161  # of which the last batch has one, so that a rank has none

class Total(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return y_pred[:, 0]

class Dies(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        start = os.environ.get("START") or os.environ["TORCHELASTIC_RESTART_COUNT"]
        if (os.environ.get("RANK", "1"), start, self.steps) == ("1", "0", 20):
            os.kill(os.getpid(), signal.SIGKILL)

keras.utils.set_random_seed(1)
strategy = dist.MultiWorkerMirroredStrategy()
with strategy.scope():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((ROWS,)), dense])
    model.compile(keras.optimizers.SGD(1.0), Total(reduction="sum"))
rows, zeros = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
steps = int(os.environ["STEPS"]) or None
epochs = 6 if steps else 2
history = model.fit(rows, zeros, batch_size=16, epochs=epochs, steps_per_epoch=steps, verbose=0, callbacks=[Dies()])
wrong = np.flatnonzero(model.get_weights()[0][:, 0] != -2).tolist()
print(f"wrong={wrong} epochs={len(history.history['loss'])}", flush=True)
"""


@pytest.mark.parametrize(("steps", "after"), [(0, 1), pytest.param(5, 4, marks=pytest.mark.nightly)])
def test_torchrun_starts_a_job_again_from_its_last_commit(steps, after, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    rank = ["--no-python", *warm_python("torch"), script]
    ended = subprocess.run(
        [*launcher, *rank],
        env={
            **os.environ,
            "KERAS_BACKEND": "torch",
            "CHOROS_COMMIT_DIR": str(tmp_path / "commits"),
            "STEPS": str(steps),
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    epochs = 6 if steps else 2
    # Two ranks write to one terminal: their lines may run into each other.
    assert re.findall(r"wrong=.*? epochs=\d+", ended.stdout) == [f"wrong=[] epochs={epochs}"] * 2
    assert re.search(rf"training goes on (after epoch {after}|in epoch {after + 1}), from the commit in", ended.stderr)


def test_a_job_of_one_rank_goes_on_from_its_last_commit(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    given = ("-np", 1, "--commit-dir", tmp_path / "commits", *warm_python("torch"), script)
    env = {"KERAS_BACKEND": "torch", "STEPS": "0"}
    killed = run(*given, env={**env, "START": "0"})
    assert killed.code == 137
    ended = run(*given, env={**env, "START": "1"})
    assert (ended.code, ended.out) == (0, "wrong=[] epochs=2\n")
    assert "training goes on after epoch 1, from the commit in" in ended.err
