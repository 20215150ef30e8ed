"""Jobs that go on without ranks that are killed: real processes, SIGKILL."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from elastic.schedules import KINDS, MIXED, MixedSchedule, Schedule, run_mixed
from elastic.schedules import run as run_schedule
from harness import needs, skip_if_left_out
from launch.launched import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), needs("mpi4py")]

HERE = Path(__file__).parent
TORCH = {"KERAS_BACKEND": "torch"}
NONE_NEW = ("-np", 3, "--min-np", 2, "--reset-limit", 0)


def fit(
    framework, kills, api="strategy", ranks=3, code=0, more=(), least=2, directory=None, warm=True, data="", **settings
):
    """Trains on ``ranks`` ranks; returns how the job ended and what the ranks report that reached the end."""
    skip_if_left_out(framework)
    # New ranks would come in time, or not.
    flags = ("-np", ranks, "--min-np", least, "--reset-limit", 0, *more)
    arguments = (
        *flags,
        sys.executable,
        HERE / "fit_script.py",
        api,
        kills,
        *([] if directory is None else [directory]),
    )
    env = {f"FIT_{name.upper()}": str(value) for name, value in {"data": data, **settings}.items()}
    ended = run(*arguments, env={"KERAS_BACKEND": framework, **env}, warm=warm, only_backend=data != "tf")
    assert ended.code == code, ended.err
    return ended, ended.reports


def script_reports(script, *arguments, framework="torch", flags=("-np", 3, "--min-np", 1), env=None):
    """What the ranks report that reach the end of a script, and of the job."""
    skip_if_left_out(framework)
    environ = {"KERAS_BACKEND": framework, **(env or {})}
    ended = run(*flags, sys.executable, HERE / script, *arguments, env=environ, warm=True)
    assert ended.code == 0, ended.err
    print(ended.err)
    return ended.reports


def check_validation(report, held_out=30, batch=16):
    """The metrics of each epoch are those of one process that evaluates each row once."""
    assert report["val_rows"] == [held_out] * 3
    assert report["val_labels"] == [held_out * (held_out - 1) / 2] * 3
    batches = [min(batch, held_out - first) for first in range(0, held_out, batch)]
    loss = sum(rows**2 for rows in batches) / held_out  # a sum in each batch, and the mean of these
    assert report["val_loss"] == pytest.approx([-loss * epoch for epoch in (1, 2, 3)])


@pytest.mark.parametrize(
    ("framework", "api", "kills", "left"),
    [
        ("torch", "strategy", "0@5,3@5", [1, 2]),  # two at once, rank 0 among them
        ("torch", "strategy", "0@primitive:37", [1, 2, 3]),  # while it broadcasts the first weights
        pytest.param("torch", "horovod", "2@6,1@16", [0, 3], marks=pytest.mark.nightly),  # and among what 2 has left
        pytest.param("tensorflow", "horovod", "1@3,0@20", [2, 3], marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", "0@4", [1, 2, 3], marks=pytest.mark.nightly),
    ],
)
def test_fit_goes_on_and_trains_on_each_row_once(framework, api, kills, left):
    ended, reports = fit(framework, kills, api, ranks=4)
    assert sorted(report["rank"] for report in reports) == left, ended.err
    for report in reports:
        assert report["wrong"] == {}
        assert (report["size"], report["epochs"], report["same_process"]) == (len(left), 3, True)
        assert report["begun"] == report["updates"]
        check_validation(report)
    assert "lost" in ended.err


@pytest.mark.parametrize(
    ("killed", "how", "files"),
    [("0,1", "after fit", ["mine.keras", "shared.keras"]), ("0", "in fit", ["shared.keras"])],
)
def test_a_model_is_saved_though_those_that_write_it_are_lost(killed, how, files, tmp_path):
    """Each in its turn, while another rank writes a file of its own; or in the last callback of ``fit``."""
    flags = ("-np", 4, "--min-np", 1, "--reset-limit", 0)
    reports = script_reports("save_script.py", tmp_path, killed, how, flags=flags)
    left = [number for number in range(4) if str(number) not in killed.split(",")]
    assert sorted(report.pop("number") for report in reports) == left
    assert reports == [{"size": len(left), "files": files}] * len(left)


@pytest.mark.parametrize("is_caught", [False, True])
def test_a_file_that_cannot_be_written_in_fit_ends_the_job_and_not_one_rank_after_another(is_caught, tmp_path):
    """As in plain Keras, not if the callback catches the error."""
    flags, how = ("-np", 3, "--min-np", 1, "--reset-limit", 0), "in fit, on a full disk" + ", tolerant" * is_caught
    ended = run(*flags, sys.executable, HERE / "save_script.py", tmp_path, "", how)
    assert (ended.code, "[Errno 28] No space left on device" in ended.err) == ((0, False) if is_caught else (1, True))
    assert {*re.findall(r"rank (\d) on \S+ failed with exit code 1 \(OSError\)", ended.err)} <= {"0"}, ended.err
    assert len(ended.reports) == 3 * is_caught
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", ["tf", pytest.param("loader", marks=pytest.mark.nightly)])
def test_what_is_left_over_of_data_of_another_framework_is_trained_on(data):
    _, reports = fit("jax", "1@3", data=data)
    assert [(report["wrong"], report["epochs"]) for report in reports] == [({}, 3)] * 2


@pytest.mark.parametrize(
    ("framework", "api", "data"),
    [
        ("torch", "strategy", "loader"),
        pytest.param("tensorflow", "strategy", "tf", marks=pytest.mark.nightly),
        pytest.param("torch", "horovod", "", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "horovod", "", marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", "", marks=pytest.mark.nightly),
    ],
)
def test_epochs_of_fewer_steps_go_on_where_the_one_before_has_ended(framework, api, data):
    _, reports = fit(framework, "1@7", api, data=data, steps=5)
    assert [(report["wrong"], report["epochs"]) for report in reports] == [({}, 3)] * 2


def test_epochs_of_one_step_less_than_the_data_have_go_on_likewise():
    script = """
import keras, numpy as np, choros.keras as hvd
hvd.init()
rows = np.eye(12, dtype="float32")
model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), lambda y_true, y_pred: keras.ops.sum(y_pred))
data = hvd.shard((rows, rows[:, :1]), batch_size=4, shuffle=True)
options = {"epochs": 2, "steps_per_epoch": 2, "shuffle": False, "verbose": 0}
model.fit(data, **options, callbacks=[hvd.callbacks.ElasticCallback(data)])
print(len(np.unique(model.get_weights()[0])), flush=True)
"""
    flags = ("-np", 2, "--min-np", 1, "--no-prefix-output")
    ended = run(*flags, sys.executable, "-c", script, env={"KERAS_BACKEND": "torch"})
    assert (ended.code, ended.out.split()) == (0, ["1"] * 2), ended.err


@pytest.mark.parametrize(
    ("framework", "api", "given"),
    [
        ("torch", "horovod", "images"),
        ("tensorflow", "strategy", "pairs"),
        pytest.param("torch", "strategy", "pairs", marks=pytest.mark.nightly),
        pytest.param("jax", "horovod", "images", marks=pytest.mark.nightly),
    ],
)
def test_a_step_of_ones_own_gets_what_lost_ranks_have_left_in_the_form_of_all_batches(framework, api, given):
    flags = ("-np", 3, "--min-np", 2, "--reset-limit", 0, "--chaos", "kill:rank=1@step=7")
    first, second = script_reports("own_step_script.py", api, given, framework=framework, flags=flags)
    assert first == second
    assert (first["forms"], first["size"]) == (1, 2)


OWN_OPTIMIZER = """
import json, os, keras, numpy as np, torch
import choros, choros.distribute as dist

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

    def compile(self, own):
        super().compile()  # with an optimizer that never trains, as in Keras' examples of GANs
        self.own = own

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.zero_grad()
        loss = self(data[0]).sum()
        loss.backward()
        with torch.no_grad():
            self.own.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}

class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3 and choros.rank() == 1 and choros.size() == 3:
            os.kill(os.getpid(), 9)

with dist.MultiWorkerMirroredStrategy().scope():
    model = Model()
    model.compile(keras.optimizers.SGD(1.0))
model.fit(np.eye(41), np.zeros((41, 1)), batch_size=8, epochs=1, verbose=0, callbacks=[Kill()])
print(json.dumps(np.unique(model.get_weights()[0]).tolist()), flush=True)
"""


APPLY = "self.own.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)"


@pytest.mark.parametrize("times", [1, 3])
def test_steps_are_those_of_the_optimizer_that_trains(times):
    """As often as a step applies it, such as that of a WGAN's critic."""
    script = OWN_OPTIMIZER.replace(APPLY, "; ".join([APPLY] * times))
    flags = ("-np", 3, "--min-np", 2, "--reset-limit", 0, "--no-prefix-output")
    ended = run(*flags, sys.executable, "-c", script, env={"KERAS_BACKEND": "torch"})
    assert (ended.code, ended.out.splitlines()) == (0, [f"[{-times:.1f}]"] * 2), ended.err
    assert "same number of times" not in ended.err


@pytest.mark.parametrize(
    ("before", "made"),
    [
        pytest.param("if int(self.own.iterations) % 2 == 0: self.other", 1, id="seldom"),
        pytest.param("self.own.apply(*given); self.other", 2, id="once"),
    ],
)
def test_steps_are_counted_by_the_optimizer_that_they_apply_most_often(before, made):
    """Another one, which comes before it, is applied in every second step, or in each once."""
    script = OWN_OPTIMIZER.replace("self.own = own", "self.other, self.own = keras.optimizers.SGD(0.0), own")
    given = APPLY.removeprefix("self.own.apply")
    each = f"given = {given}\n            {before}.apply(*given)\n            self.own.apply(*given)"
    flags = ("-np", 3, "--min-np", 2, "--reset-limit", 0, "--no-prefix-output")
    ended = run(*flags, sys.executable, "-c", script.replace(APPLY, each), env={"KERAS_BACKEND": "torch"})
    assert (ended.code, ended.out.splitlines()) == (0, [f"[{-made:.1f}]"] * 2), ended.err
    assert "same number of times" not in ended.err


def test_an_optimizer_that_steps_do_not_apply_as_often_is_warned_of():
    twice = f"[{APPLY} for _ in range(1 + (int(self.own.iterations) == 3))]"
    script = OWN_OPTIMIZER.replace(APPLY, twice).replace("batch == 3", "False")
    flags = ("-np", 2, "--min-np", 1, "--no-prefix-output")
    ended = run(*flags, sys.executable, "-c", script, env={"KERAS_BACKEND": "torch"})
    assert ended.code == 0, ended.err
    assert ended.err.count("does not apply its optimizer the same number of times") == 1, ended.err


def test_a_batch_that_does_not_exist_is_no_step():
    """Keras finds the end of data of unknown length in a call in which it makes none."""
    script = """
import keras, numpy as np, tensorflow as tf, choros.distribute as dist
with dist.MultiWorkerMirroredStrategy().scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((17, 3), "float32"), np.ones((17, 1), "float32"))).batch(8)
model.fit(data.filter(lambda *_: True), epochs=2, verbose=0)
"""
    flags = ("-np", 2, "--min-np", 1, "--no-prefix-output")
    ended = run(*flags, sys.executable, "-c", script, env={"KERAS_BACKEND": "tensorflow"})
    assert ended.code == 0, ended.err
    assert "same number of times" not in ended.err


@pytest.mark.parametrize(
    ("framework", "api"),
    [
        pytest.param("torch", "strategy", marks=pytest.mark.nightly),
        ("tensorflow", "horovod"),
        pytest.param("jax", "strategy", marks=pytest.mark.nightly),
    ],
)
def test_the_last_step_is_kept_if_the_only_rank_with_rows_dies_after_it(framework, api):
    ended, reports = fit(framework, "0@ended:12", api, rows=193)  # of which the last batch has one
    expected = (2, {}, 3 * 13)
    assert [(each["size"], each["wrong"], each["updates"]) for each in reports] == [expected] * 2, ended.err


@pytest.mark.parametrize(
    ("framework", "api", "kills"),
    [
        ("torch", "strategy", "1@bucket:13,0@bucket:26"),  # of three buckets: the second, and later the last
        pytest.param("torch", "horovod", "1@bucket:12,3@bucket:13", marks=pytest.mark.nightly),
        pytest.param("torch", "strategy", "1@bucket:13,3@recovery:0", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", "1@bucket:13,0@bucket:26", marks=pytest.mark.nightly),
        pytest.param("jax", "horovod", "1@bucket:13,0@bucket:26", marks=pytest.mark.nightly),
    ],
)
def test_a_step_whose_gradients_were_sent_in_part_is_made_again(framework, api, kills, monkeypatch):
    monkeypatch.setenv("CHOROS_OVERLAP", "1")
    _, reports = fit(framework, kills, api, ranks=4)
    assert [(report["size"], report["wrong"]) for report in reports] == [(2, {})] * 2


@pytest.mark.parametrize(("kills", "overlap"), [("1@5,0@20", "0"), ("1@bucket:13,0@bucket:26", "1")])
def test_the_noise_scale_is_that_of_steps_that_have_ended_on_all_ranks(kills, overlap, monkeypatch):
    monkeypatch.setenv("CHOROS_OVERLAP", overlap)
    monkeypatch.setenv("CHOROS_NOISE_SCALE", "1")
    _, (first, second) = fit("torch", kills, ranks=4)
    assert first["noise"].startswith("NoiseScale")
    assert (first["noise"], first["wrong"]) == (second["noise"], {})


@pytest.mark.parametrize("framework", ["tensorflow", "torch", pytest.param("jax", marks=pytest.mark.nightly)])
def test_a_loss_that_was_weighted_before_a_rank_was_lost_is_of_no_account_to_another_model(framework):
    reports = script_reports("two_models_script.py", framework=framework, flags=NONE_NEW)
    assert reports == [{"size": 2, "difference": pytest.approx(0, abs=1e-5)}] * 2


@pytest.mark.parametrize("framework", ["jax", pytest.param("torch", marks=pytest.mark.nightly)])
def test_a_scaled_loss_of_which_some_ranks_have_no_rows(framework):
    ended, reports = fit(framework, "", rows=193, scaled=1)
    assert [(report["size"], report["wrong"]) for report in reports] == [(3, {})] * 3, ended.err


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.nightly)])
def test_micro_batches_of_a_scaled_loss_are_not_lost_with_a_rank(framework):
    """13 an epoch: one is left over; rank 1 is lost before the next epoch's first update."""
    _, reports = fit(framework, "1@13", scaled=1, micro_batches=2)
    assert [(report["size"], report["wrong"]) for report in reports] == [(2, {})] * 2


@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.nightly)])
def test_the_next_rank_0_goes_on_with_what_only_rank_0_prints_and_writes(framework, tmp_path):
    ended, reports = fit(framework, "0@17", ranks=2, least=1, directory=tmp_path, verbose=2)
    assert [report["wrong"] for report in reports] == [{}], ended.err
    assert [row.partition(",")[0] for row in (tmp_path / "log.csv").read_text().split()] == ["epoch", "0", "1", "2"]
    assert json.loads((tmp_path / "backup" / "training_metadata.json").read_text())["epoch"] == 3
    assert re.findall(r"Epoch (\d)/3", ended.out) == ["1", "2", "2", "3"]
    assert len(re.findall("13/13.* loss: .* val_loss: ", ended.out)) == 3


@pytest.mark.parametrize(
    ("framework", "api", "data"),
    [
        ("torch", "horovod", "loader"),
        pytest.param("torch", "strategy", "grain", marks=pytest.mark.nightly),
        pytest.param("torch", "strategy", "py_dataset", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", "tf", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "horovod", "py_dataset", marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", "", marks=pytest.mark.nightly),
        pytest.param("jax", "horovod", "", marks=pytest.mark.nightly),
    ],
)
def test_validation_is_made_again_without_ranks_that_are_lost_in_it(framework, api, data):
    """One is lost in a step before it, one in the middle of it, and one when it is made again."""
    ended, (report,) = fit(framework, "0@5,1@validation:1,2@validation:2", api, ranks=4, least=1, data=data)
    assert (report["rank"], report["size"], report["wrong"]) == (3, 1, {}), ended.err
    check_validation(report)


@pytest.mark.parametrize("kind", ["arrays", "batches"])
def test_a_prediction_is_made_again_without_a_rank_that_is_lost_in_it(kind):
    reports = script_reports("predict_script.py", kind, flags=NONE_NEW)
    assert sorted(report["rank"] for report in reports) == [0, 2]
    assert all(report["size"] == 2 and report["same"] for report in reports)


@pytest.mark.parametrize(
    "kind",
    ["tensorflow", *[pytest.param(kind, marks=pytest.mark.nightly) for kind in ("loader", "batches")]],
)
def test_a_data_set_that_was_distributed_once_is_sharded_over_the_ranks_of_each_epoch(kind):
    environ = {"KERAS_BACKEND": "tensorflow" if kind == "tensorflow" else "torch"}
    script = HERE / "distributed_script.py"
    ended = run("-np", 3, "--min-np", 2, sys.executable, script, kind, env=environ, warm=True)
    assert ended.code == 0, ended.err
    assert re.findall("epoch [12]: .*", ended.out) == [
        f"epoch {epoch}: 5 steps, 50 rows, 50 different, sum 1225" for epoch in (1, 2)
    ]
    assert "epoch 0: 5 steps, 33 rows, 33 different" in ended.out  # those of the ranks that are left: shards 0 and 2
    assert ended.err.count("if a rank is lost in a loop of your own") == 1


@pytest.mark.parametrize(
    ("framework", "data"),
    [
        ("jax", ""),
        pytest.param("torch", "py_dataset", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "", marks=pytest.mark.nightly),
    ],
)
def test_ranks_without_rows_for_validation_have_the_metrics_of_the_others(framework, data):
    ended, reports = fit(framework, "0@validation:0", ranks=4, data=data, held_out=2)
    assert [(report["size"], report["wrong"]) for report in reports] == [(3, {})] * 3, ended.err
    for report in reports:
        check_validation(report, held_out=2)


def test_fit_goes_on_without_a_rank_that_is_stopped():
    ended, reports = fit("torch", "", more=("--stall-shutdown", 20, "--chaos", "stop:rank=1@step=7+600s"), warm=False)
    assert [(report["size"], report["wrong"]) for report in reports] == [(2, {})] * 2, ended.err
    assert "rank 1 will be killed.\nchorosrun: rank 1 was killed; 2 ranks go on.\n" in ended.err


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(9, 9 + len(KINDS)))
def test_a_schedule_of_deaths(seed):
    """One of each kind; ``schedules.py`` runs more, and takes their times."""
    _, problems = run_schedule(Schedule.drawn(seed))
    assert not problems


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in (6, 12) else pytest.mark.nightly) for seed in range(2 * len(MIXED))]
)
def test_a_schedule_of_any_faults(seed):
    """Each kind on two frameworks; the job goes on, or ends as documented. ``schedules.py`` takes their times."""
    schedule = MixedSchedule.drawn(seed)
    skip_if_left_out(schedule.framework)
    if os.geteuid() != 0 and ("full" in schedule.kind or "link" in schedule.kind):
        pytest.skip("file systems and links of the test's own need root")
    _, problems = run_mixed(schedule)
    assert not problems, schedule


def test_ranks_leave_in_order_though_another_is_lost_at_the_end():
    script = "import os, choros; choros.init(); choros.comm.global_process_set.rank() == 1 and os.kill(os.getpid(), 9)"
    ended = run(*NONE_NEW, sys.executable, "-c", script)
    assert (ended.code, "Exception ignored" in ended.err) == (0, False), ended.err


def test_an_average_of_sparse_gradients_is_divided_by_the_ranks_that_are_left():
    script = """
import os, signal, torch, choros.torch as hvd
from choros.comm import global_process_set
hvd.init()
rows = torch.sparse_coo_tensor([[hvd.rank()]], [[6.0]], (3, 1))
if hvd.rank() == 2:
    global_process_set.communicator.grouped_allgather = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
print(hvd.allreduce(rows).to_dense().flatten().tolist(), flush=True)
"""
    ended = run(*NONE_NEW, sys.executable, "-c", script, env=TORCH)
    assert ended.code == 0, ended.err
    assert ended.out.count("[3.0, 3.0, 0.0]") == 2, ended.out


def test_a_job_with_too_few_ranks_ends_with_a_clear_error():
    ended = run("-np", 4, "--min-np", 3, sys.executable, HERE / "collectives_script.py", 0)
    assert ended.code == 69
    assert "2 of 4 ranks are left, fewer than --min-np 3" in ended.err, ended.err
    assert "2 go on" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize("seed", range(3))
def test_collectives_of_all_kinds_go_on(seed):
    ended = run("-np", 4, "--min-np", 1, sys.executable, HERE / "collectives_script.py", seed)
    assert ended.code == 0, ended.err
    assert len(re.findall(r"2 left", ended.out)) == 2, ended.out + ended.err


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_rank_is_lost_in_the_recovery_from_another_loss(nth):
    """In Open MPI 5.0.10 and 5.0.11 a SIGSEGV of all that are left (open-mpi/ompi#14492)."""
    flags = ("-np", 4, "--min-np", 1, "--reset-limit", 0)
    ended = run(*flags, sys.executable, HERE / "lost_in_recovery_script.py", nth)
    assert ended.code == 0, ended.err
    said = [f"[{rank}] rank {rank}: {each}" for rank in (0, 2) for each in ("(0, 2) left, 2.0", "MPI has ended: True")]
    assert sorted(ended.out.splitlines()) == said, ended.err


@pytest.mark.parametrize("victim", ["new", "2"])
def test_ranks_that_mpi_keeps_in_an_admission_end(victim):
    """Those that are in MPI's Merge with a rank that is lost could not go on: the job is started again."""
    ended = run("-np", 3, "--min-np", 1, sys.executable, HERE / "lost_in_admission_script.py", victim)
    assert ended.code == 0, ended.err
    assert "a rank was lost while MPI connected a new one, and MPI waits for it: this rank ends" in ended.err
    assert re.search(r"on \S+ was lost while MPI connected a new one; it is started again", ended.err), ended.err


def test_a_job_that_a_rank_has_finished_is_not_started_again_for_one_that_mpi_has_kept():
    """That one learns of the loss from rank 0, which waits for it: else both wait for ever."""
    script = HERE / "lost_in_admission_script.py"
    ended = run("-np", 3, "--min-np", 1, sys.executable, script, "new", "SIGKILL", "noticed")
    assert ended.code == 0, ended.err
    assert (
        "[2] choros: a rank was lost while MPI connected a new one, and MPI waits for it: this rank ends" in ended.err
    )
    assert "started again" not in ended.err


def test_others_do_not_go_on_without_a_rank_whose_script_ends():
    script = """
import sys, choros
from choros.comm import global_process_set
choros.init()
if choros.rank() == 1:
    sys.exit(3)
global_process_set.communicator.barrier()
"""
    ended = run("-np", 3, "--min-np", 2, sys.executable, "-c", script)
    assert ended.code in (1, 3)  # whichever ends first
    assert "They go on without one that raises an exception, not without one whose script ends" in ended.err


@pytest.mark.parametrize("point", ["_meet", "_Comms.of"])
def test_a_rank_is_lost_in_init(point):
    script = f"""
import os, signal, choros
from choros.comm.engines import mpi
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    mpi.{point} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
choros.init()
"""
    ended = run("-np", 3, "--min-np", 2, sys.executable, "-c", script)
    assert ended.code == 69, ended.err
    assert ended.err.endswith("PeerLostError: a rank was lost before all had left init(): the job ends.\n")
    assert "it is started again" not in ended.err


def test_a_rank_that_is_stopped_in_an_admission_is_reported():
    flags = ("-np", 3, "--min-np", 1, "--stall-shutdown", 5)
    script = (sys.executable, HERE / "lost_in_admission_script.py", "2", "SIGSTOP")
    ended = run(*flags, *script, env={"CHOROS_STALL_SECONDS": "2"})
    assert "ranks 0, 2 have been in the admission of a new rank" in ended.err, ended.err
    assert re.search(r"rank 2 on \S+, PID \d+ is stopped", ended.err), ended.err
    assert "rank 2 will be killed" in ended.err


def test_a_rank_that_is_stopped_as_others_recover_is_killed():
    script = """
import os, signal, choros
from choros.comm import Reduction, global_process_set
from choros.comm.engines.mpi import MpiCommunicator
choros.init()
number, communicator = choros.rank(), global_process_set.communicator
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if number == 2:
    MpiCommunicator._recover = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
print(communicator.allreduce(1.0, Reduction.SUM), flush=True)
"""
    flags = ("-np", 4, "--min-np", 2, "--reset-limit", 0, "--stall-shutdown", 20)
    ended = run(*flags, sys.executable, "-c", script, env={"CHOROS_STALL_SECONDS": "2"})
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[0] 2.0", "[3] 2.0"]
    assert "rank 2 will be killed" in ended.err


def test_init_after_a_loss_is_an_error():
    script = """
import os, choros
from choros.comm import global_process_set
choros.init()
if choros.rank() == 1:
    os.kill(os.getpid(), 9)
global_process_set.communicator.barrier()
choros.shutdown()
choros.init()
"""
    ended = run(*NONE_NEW, sys.executable, "-c", script)
    assert ended.code != 0
    assert "init() cannot be called again after shutdown() once an elastic job has lost or new ranks" in ended.err


def test_a_rank_is_lost_while_a_process_set_is_made():
    """The set has those of its ranks that are left, by whichever numbers they have then."""
    script = """
import os, choros
from choros.comm import Reduction, global_process_set
choros.init()
number, communicator = choros.rank(), global_process_set.communicator
if number == 0:
    communicator._split = lambda *_: os.kill(os.getpid(), 9)
both = choros.add_process_set([1, 2])
one = choros.add_process_set([1]).included()
print(number, both.communicator.allreduce(float(number), Reduction.SUM), one, flush=True)
"""
    ended = run(*NONE_NEW, sys.executable, "-c", script)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[1] 1 3.0 False", "[2] 2 3.0 True"]


def test_a_new_rank_that_is_left_alone_before_it_has_the_state_does_not_begin_anew(tmp_path):
    """Also when chorosrun has not yet read from that rank itself that it was taken in: here it does not say so."""
    script = f"""
import os, choros
from pathlib import Path
from choros.comm import global_process_set
from choros.elastic.retry import run
from choros.elastic.state import ObjectState
from choros.observe import events
choros.init()
is_new, number = global_process_set.communicator.is_new, choros.rank()
events.heard = frozenset() if is_new else events.heard
come = Path({str(tmp_path / "come")!r})
class Dying(ObjectState):
    def sync(self):
        if is_new:
            come.touch()
        if number == 0 and self.epoch > 5:
            while not come.exists():  # a new rank that loses others as it comes in just ends
                pass
            os.kill(os.getpid(), 9)
        super().sync()
@run
def train(state):
    print(number, is_new, flush=True)
    while True:
        if number == 1 and not is_new and state.epoch == 5:
            os.kill(os.getpid(), 9)
        global_process_set.communicator.barrier()
        state.epoch += 1
        state.commit()
train(Dying(epoch=0))
"""
    ended = run("-np", 2, "--min-np", 1, sys.executable, "-c", script)
    assert ended.code != 0, ended.err
    assert "all ranks with the state of the training were lost before this one, which is new, had received" in ended.err
    assert "True" not in ended.out


def garbled(*arguments):
    """Runs the job with ``garbled_script.py``; returns the reports of its ranks and its messages."""
    flags = ("-np", 3, "--min-np", 1, "--reset-limit", 0)
    ended = run(*flags, sys.executable, HERE / "garbled_script.py", *arguments)
    assert ended.code == 0, ended.err
    return dict(re.findall(r"rank (\d): (.*)", ended.out)), ended.err


def reports_of(total, *others):
    """What they report: an error that all know is no loss."""
    return {"0": f"{total}, ValueError after 1"} | dict.fromkeys(others, f"{total}, MismatchError after 1")


@pytest.mark.parametrize(("rank_1", "reports"), [("killed", reports_of(22.0, "2")), ("lives", reports_of(33.0, *"12"))])
def test_what_cannot_be_decoded_is_received_again(rank_1, reports):
    assert garbled(rank_1, 1)[0] == reports


def test_what_can_never_be_decoded_is_an_error_of_its_rank_alone():
    reports, messages = garbled("lives", 2)
    assert "LookupError: what was received" in messages
    assert reports == reports_of(22.0, "1")


def test_what_cannot_be_decoded_while_another_rank_is_served_is_received_again():
    """As the lengths of a lost rank's part of a state that rank 0 saves alone."""
    script = """
import os, signal, numpy as np, choros
from choros.comm import global_process_set
from choros.comm.request import Request
choros.init()
communicator, request = global_process_set.communicator, Request("state", served=True)
number = communicator.rank
class State:
    def part(self, value):
        if number == 1: os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and communicator.size == 3: raise MemoryError("what was received")
        return communicator.gather_bytes(np.array([number], np.uint8), [1] * communicator.size)
    def whole(self):
        communicator.agree(request, value=7)
        return self.part(7).tolist()
state = State()
communicator.serve(request, state.part)
if number == 0: print(communicator.atomic(state.whole), flush=True)
communicator.barrier()
"""
    flags = ("-np", 3, "--min-np", 1, "--reset-limit", 0, "--no-prefix-output")
    ended = run(*flags, sys.executable, "-c", script)
    assert (ended.code, ended.out.split("\n")[0]) == (0, "[0, 2]"), ended.err


@pytest.mark.parametrize(
    ("framework", "api"),
    [
        ("torch", "strategy"),
        pytest.param("tensorflow", "horovod", marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", marks=pytest.mark.nightly),
    ],
)
def test_micro_batches_of_a_lost_rank_are_trained_on_by_others(framework, api):
    _, reports = fit(framework, "0@6,3@15", api, ranks=4, micro_batches=4)  # two since the last update, and three
    assert [(report["size"], report["wrong"]) for report in reports] == [(2, {})] * 2


def test_the_same_command_goes_on_from_the_last_step_with_fewer_ranks(tmp_path):
    given = {"more": ("--commit-dir", tmp_path / "commits"), "micro_batches": 4}
    ended, reports = fit("torch", "0@22,1@22", code=69, **given)  # in the second epoch, two since the last update
    assert reports == []
    assert "commit-00000002.npz" in os.listdir(tmp_path / "commits" / "fit-1")
    ended, reports = fit("torch", "", ranks=2, **given)
    assert "training goes on in epoch 2" in ended.err
    for report in reports:
        assert (report["wrong"], report["epochs"]) == ({}, 3)  # the history has the first epoch, too


@pytest.mark.parametrize(
    ("how", "kills", "env"),
    [
        pytest.param("plain", "0@5", {}, marks=pytest.mark.nightly),
        ("plain", "1@left:1", {"EXAMPLES": "74"}),  # when it and another have made 7 steps, and one 6
        pytest.param("plain", "0@bucket:16", {"CHOROS_OVERLAP": "1"}, marks=pytest.mark.nightly),
        ("run", "0@5", {}),
        pytest.param("run", "0@bucket:16", {"CHOROS_OVERLAP": "1"}, marks=pytest.mark.nightly),
    ],
)
def test_a_loop_of_torch_trains_on_each_example_once(how, kills, env):
    reports = script_reports("torch_script.py", kills, how, flags=NONE_NEW, env=env)
    assert [(report["size"], report["wrong"]) for report in reports] == [(2, {})] * 2


def test_a_lost_rank_is_replaced_in_a_function_of_elastic_run():
    reports = script_reports("torch_script.py", "0@5", "replaced")
    assert [(report["size"], report["wrong"]) for report in reports] == [(3, {})] * 3


def test_a_rank_that_is_lost_in_a_validation_of_elastic_run_is_replaced():
    expected = {"size": 3, "epoch": 4, "rows": [[96.0, 30.0]]}
    assert script_reports("run_script.py") == [{"number": number, **expected} for number in range(3)]


@pytest.mark.parametrize(
    ("framework", "api", "kills"),
    [
        ("torch", "strategy", "0@5,2@5"),  # one is replaced after the other, rank 0 among them
        pytest.param("torch", "horovod", "0@20", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "horovod", "1@5", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", "1@5", marks=pytest.mark.nightly),
        pytest.param("jax", "strategy", "2@5", marks=pytest.mark.nightly),
    ],
)
def test_lost_ranks_are_replaced_in_fit_and_each_row_is_trained_on_once(framework, api, kills):
    new = new_ranks_of_fit(framework, api, kills, "-np", 3)
    assert new == {int(kill[0]) for kill in kills.split(",")}


@pytest.mark.nightly
def test_a_new_rank_joins_others_that_train_on_what_a_lost_one_has_left_over():
    """Their steps exchange what its steps do, though TensorFlow knows the number of rows in theirs alone."""
    assert new_ranks_of_fit("tensorflow", "strategy", "1@5", "-np", 3, more=["joined"]) == {0, 1}


@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tensorflow", "jax"))]
)
@pytest.mark.parametrize("api", ["strategy", "horovod"])
def test_rank_0_is_lost_as_it_would_send_its_state_to_a_new_rank(framework, api):
    """The next one that was there before sends its own, which is the same, and where it is in the epoch now."""
    assert new_ranks_of_fit(framework, api, "1@5", "-np", 3, more=["sends"]) == {0, 1}
    assert new_ranks_of_fit(framework, api, "1@1", "-np", 3, more=["waits", "sends"]) == {0, 1}


@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tensorflow", "jax"))]
)
def test_a_rank_is_lost_before_a_new_one_begins_the_epoch_that_it_takes_over(framework, monkeypatch):
    """Slices are cut anew before that: the new rank's plan of the epoch is without it, too."""
    monkeypatch.setenv("CHOROS_SHARD_STATE", "1")
    assert new_ranks_of_fit(framework, "strategy", "1@1", "-np", 3, more=["waits", "cuts"]) == {0, 1}


@pytest.mark.parametrize("framework", ["torch", "tensorflow", pytest.param("jax", marks=pytest.mark.nightly)])
def test_a_job_that_ends_before_the_first_step_of_a_new_rank_commits(framework, tmp_path):
    skip_if_left_out(framework)
    script = (sys.executable, HERE / "replaced_script.py", "strategy", "1@1", "waits", "ends")
    flags = ("-np", 3, "--min-np", 1, "--commit-dir", tmp_path)
    ended = run(*flags, *script, env={"KERAS_BACKEND": framework}, warm=True)
    assert ended.code == 75, ended.err
    assert list(tmp_path.glob("fit-1/*.npz"))


def test_a_lost_rank_is_replaced_in_the_middle_of_an_epoch(tmp_path):
    commits = ("--commit-dir", tmp_path, "--commit-steps", 4)
    assert new_ranks_of_fit("torch", "strategy", "1@1", "-np", 3, *commits, more=["waits"], epochs=3) == {1}


@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tensorflow", "jax"))]
)
def test_a_new_rank_has_the_state_of_the_others_and_not_that_of_an_older_commit(framework, tmp_path):
    assert new_ranks_of_fit(framework, "horovod", "1@30", "-np", 3, "--commit-dir", tmp_path) == {1}


def test_a_job_grows_in_fit():
    """From one rank to three, of which two come at once or one after the other."""
    assert new_ranks_of_fit("torch", "strategy", "", "-H", "localhost:4", "-np", 1, "--max-np", 3) == {1, 2}


def test_a_job_ends_before_the_rank_by_which_it_would_grow_has_come(tmp_path):
    """No rank is lost, but MPI would wait for that process for ever."""
    script = f"""
import time, choros
from pathlib import Path
from choros.comm import Reduction, global_process_set, opening
come = Path({str(tmp_path / "come")!r})
choros.init()
communicator = global_process_set.communicator
if communicator.is_new:
    come.touch()
    time.sleep(5)  # MPI has connected it, and it has not come in, while the others end
else:
    with opening():
        while not communicator.allreduce(float(come.exists()), Reduction.MAX):
            pass
"""
    ended = run("-H", "localhost:4", "-np", 2, "--min-np", 1, "--max-np", 3, sys.executable, "-c", script)
    assert ended.code == 0, ended.err


def test_a_new_rank_has_the_noise_scale_of_the_others(monkeypatch):
    monkeypatch.setenv("CHOROS_NOISE_SCALE", "3")
    assert new_ranks_of_fit("torch", "strategy", "1@5", "-np", 3) == {1}


def new_ranks_of_fit(framework, api, kills, *flags, more=(), epochs=None):
    """Trains until there are three ranks, in ``epochs`` epochs; returns the numbers of those that are new."""
    flags = (*flags, "--min-np", 1)
    reports = script_reports("replaced_script.py", api, kills, *more, framework=framework, flags=flags)
    assert [report["number"] for report in reports] == [0, 1, 2]
    for report in reports:
        assert (report["wrong"], report["size"], report["same_process"]) == ({}, 3, True)
    assert len({(report["epochs"], report["val_loss"], report["noise"]) for report in reports}) == 1
    assert epochs in (None, reports[0]["epochs"])
    return {report["number"] for report in reports if report["new"]}


@pytest.mark.parametrize(
    ("api", "framework"),
    [
        ("strategy", "torch"),
        ("run", "torch"),
        pytest.param("horovod", "torch", marks=pytest.mark.nightly),
        pytest.param("strategy", "tensorflow", marks=pytest.mark.nightly),
        pytest.param("strategy", "jax", marks=pytest.mark.nightly),
    ],
)
def test_a_new_rank_has_the_results_of_what_it_passes_by(api, framework, tmp_path):
    reports = script_reports("search_script.py", api, tmp_path, framework=framework)
    assert sorted((each["new"], each["size"]) for each in reports) == [(False, 3), (False, 3), (True, 3)]
    (own,) = (each["results"] for each in reports if each["new"])
    assert own in [each["results"] for each in reports if not each["new"]]


@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tensorflow", "jax"))]
)
def test_a_job_that_ends_in_a_fit_in_a_function_of_elastic_run_goes_on_from_its_state(framework, tmp_path):
    """Each row is trained on in three calls of ``fit``, in the second of which the job is asked to end."""
    skip_if_left_out(framework)
    for code, what in ((75, "ends"), (0, "goes on")):
        script = (sys.executable, HERE / "nested_script.py", what)
        flags = ("-np", 3, "--min-np", 2, "--commit-dir", tmp_path)
        ended = run(*flags, *script, env={"KERAS_BACKEND": framework}, warm=True)
        assert ended.code == code, ended.err
    assert [(each["result"], each["updates"]) for each in ended.reports] == [(3, 12)] * 3
    assert os.listdir(tmp_path) == ["run-1"]


@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("tensorflow", "jax"))]
)
def test_a_new_rank_comes_between_two_fits_in_a_function_of_elastic_run(framework):
    reports = script_reports("nested_script.py", framework=framework)
    assert [(each["number"], each["new"], each["size"]) for each in reports] == [
        (0, False, 3),
        (1, True, 3),
        (2, False, 3),
    ]
    assert len({(each["result"], each["calls"]) for each in reports}) == 1


@pytest.mark.parametrize(
    ("victims", "what", "left"),
    [
        ("0 2", "join", ["number 0 is rank 1 of 3: 3", "number 1 is rank 0 of 3: 3", "number 2 is rank 2 of 3: 3"]),
        ("1", "closed", ["number 0 is rank 0 of 3: 3", "number 1 is rank 2 of 3: 3", "number 2 is rank 1 of 3: 3"]),
        ("1", "die", ["number 0 is rank 0 of 3: 3", "number 1 is rank 2 of 3: 3", "number 2 is rank 1 of 3: 3"]),
        pytest.param(
            "1",
            "early",
            ["number 0 is rank 0 of 3: 3", "number 1 is rank 2 of 3: 3", "number 2 is rank 1 of 3: 3"],
            marks=pytest.mark.nightly,
        ),
        ("1", "late", ["number 0 is rank 0 of 2: 2", "number 2 is rank 1 of 2: 2"]),
        ("0", "leave", ["number 1 is rank 0 of 2: 2", "number 2 is rank 1 of 2: 2"]),
    ],
)
def test_new_ranks_take_the_places_of_lost_ones(victims, what, left, tmp_path):
    script = HERE / "new_ranks_script.py"
    env = {"CHOROS_START_TIMEOUT": "10"} if what == "early" else {}
    ended = run("-np", 3, "--min-np", 1, sys.executable, script, *victims.split(), what, cwd=tmp_path, env=env)
    assert ended.code == 0, ended.err
    assert sorted(re.findall("number .*", ended.out)) == left, ended.err
    assert ("a new rank" in ended.err) == (what != "leave")


@pytest.mark.parametrize("moment", ["join", "broadcast_parameters", "broadcast_optimizer_state"])
def test_ranks_that_join_early_get_the_last_ones_weights_though_another_is_lost(moment):
    ended = run(*NONE_NEW, sys.executable, HERE / "join_script.py", moment, env=TORCH, warm=True)
    assert ended.code == 0, ended.err
    assert re.findall("1 of 2: .*", ended.out) == ["1 of 2: 10.031, -1.969"] * 2


# slices of an optimizer's state, which counts the rows, too -------------------------------------


@pytest.fixture
def sharded(monkeypatch):
    monkeypatch.setenv("CHOROS_SHARD_STATE", "1")
    monkeypatch.setenv("FIT_MOMENTUM", "1")


@pytest.mark.parametrize(
    ("framework", "api", "kills", "left"),
    [
        ("torch", "strategy", "0@5,2@20", [1, 3]),
        ("torch", "strategy", "1@5=SIGTERM,2@5=SIGTERM", [0, 3]),  # neighbours, which leave one by one
        pytest.param("torch", "horovod", "1@5,3@5", [0, 2], marks=pytest.mark.nightly),  # no neighbours
        ("tensorflow", "horovod", "3@5", [0, 1, 2]),
        pytest.param("jax", "horovod", "2@primitive:100", [0, 1, 3], marks=pytest.mark.nightly),
        ("jax", "strategy", "1@5", [0, 2, 3]),
        ("torch", "horovod", "1@validation:1,2@validation:2", [0, 3]),  # which had a copy, between two updates
        pytest.param("jax", "strategy", "1@validation:1,2@validation:2", [0, 3], marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", "1@validation:1,2@validation:2", [0, 3], marks=pytest.mark.nightly),
    ],
)
def test_slices_are_rebuilt_from_their_copies_and_cut_anew(framework, api, kills, left, sharded):
    ended, reports = fit(framework, kills, api, ranks=4, least=1)
    assert sorted(report["rank"] for report in reports) == left, ended.err
    assert [(report["wrong"], report["size"]) for report in reports] == [({}, len(left))] * len(left)
    assert len({report["weights"] for report in reports}) == 1


@pytest.mark.parametrize(
    ("framework", "api", "kills"),
    [
        ("torch", "horovod", "1@5,2@11"),  # each between two micro-batches of an update
        pytest.param("torch", "strategy", "1@4,3@8", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "horovod", "1@5,2@11", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "strategy", "2@13,0@15", marks=pytest.mark.nightly),  # an epoch ends
        pytest.param("jax", "strategy", "1@5,2@11", marks=pytest.mark.nightly),
        pytest.param("jax", "horovod", "0@13,2@14", marks=pytest.mark.nightly),
    ],
)
def test_micro_batches_of_slices_are_those_of_each_row_once(framework, api, kills, monkeypatch):
    monkeypatch.setenv("CHOROS_SHARD_STATE", "1")
    _, reports = fit(framework, kills, api, ranks=4, least=1, micro_batches=3)
    assert [(report["wrong"], report["size"]) for report in reports] == [({}, 2)] * 2


@pytest.mark.parametrize(
    ("framework", "api"),
    [
        ("torch", "strategy"),  # whose rank 0 alone reads the backup, before the commit
        pytest.param("torch", "horovod", marks=pytest.mark.nightly),
        pytest.param("tensorflow", "horovod", marks=pytest.mark.nightly),
        pytest.param("jax", "horovod", marks=pytest.mark.nightly),
    ],
)
def test_a_job_that_has_lost_a_slice_and_its_copy_is_started_again(framework, api, sharded, tmp_path):
    again = ("--commit-dir", tmp_path / "commits", "--reset-limit", 1)
    ended, reports = fit(framework, "1@17,2@17", api, ranks=4, more=again, directory=tmp_path)
    said = (
        r"ranks 1, 2 on \S+ were lost, and with them a slice of the optimizer's state and its copy; it is started again"
    )
    assert re.search(said, ended.err)
    assert "training goes on in epoch 2" in ended.err
    assert [(report["wrong"], report["size"], report["epochs"]) for report in reports] == [({}, 4, 3)] * 4


@pytest.mark.parametrize(
    ("framework", "more"),
    [
        ("torch", ["waits"]),  # in the middle of an epoch
        ("torch", ["validates"]),  # before slices were cut without the rank of which it has the number
        pytest.param("tensorflow", [], marks=pytest.mark.nightly),
        pytest.param("jax", [], marks=pytest.mark.nightly),
    ],
)
def test_a_new_rank_receives_its_slices(framework, more, sharded):
    kills = "1@1" if more else "1@5"
    assert new_ranks_of_fit(framework, "strategy", kills, "-np", 3, more=more) == {1}


def test_a_new_rank_that_is_left_alone_before_it_has_its_slices_does_not_go_on_without_them(sharded):
    script = (sys.executable, HERE / "replaced_script.py", "strategy", "1@1", "waits", "cuts")
    ended = run("-np", 2, "--min-np", 1, *script, env={"KERAS_BACKEND": "torch"}, warm=True)
    assert ended.code == 0, ended.err
    assert "lost, and with them a slice of the optimizer's state and its copy; it is started again" in ended.err
    assert [(each["wrong"], each["size"], each["epochs"]) for each in ended.reports] == [({}, 2, 3)] * 2


def test_a_new_rank_in_slices_releases_the_whole_state_that_it_came_with(sharded):
    assert new_ranks_of_fit("torch", "horovod", "1@5", "-np", 3, more=["built"]) == {1}


def test_a_new_rank_joins_before_the_first_step(sharded):
    """On TensorFlow, which builds optimizers in it."""
    assert new_ranks_of_fit("tensorflow", "horovod", "1@0", "-np", 3, more=["begins"]) == {1}


def test_a_job_in_slices_grows(sharded):
    assert new_ranks_of_fit("torch", "strategy", "", "-H", "localhost:4", "-np", 1, "--max-np", 3) == {1, 2}


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(20, 40)), 4])
def test_a_schedule_of_deaths_in_slices(seed):
    """``schedules.py --sharded`` runs more."""
    framework = ("torch", "tensorflow", "jax")[seed % 3]
    skip_if_left_out(framework)
    _, problems = run_schedule(Schedule.drawn(seed), framework=framework, sharded=True)
    assert not problems


@pytest.mark.parametrize(
    ("framework", "arguments", "left"),
    [
        ("torch", ["0@7,2@9", "replaced"], [0, 1, 2, 3]),
        ("torch", ["1@5", "clipped"], [0, 2, 3]),
        pytest.param("tensorflow", ["0@7,2@9", "replaced", "clipped"], [0, 1, 2, 3], marks=pytest.mark.nightly),
        ("jax", ["1@5", "clipped"], [0, 2, 3]),
        ("torch", ["1@5", "again"], [0, 3]),
        ("torch", ["1@5,2@9", "two"], [0, 3]),
    ],
)
def test_slices_in_a_function_of_elastic_run(framework, arguments, left):
    reports = sharded_run(framework, *arguments)
    assert [report["number"] for report in reports] == left
    assert [(report["wrong"], report["size"]) for report in reports] == [({}, len(left))] * len(left)
    assert len({report["weights"] for report in reports}) == 1
    assert sum(report["held"] for report in reports) == pytest.approx(2, abs=0.01)  # each slice, and its copy


def test_a_commit_of_elastic_run_has_the_state_of_one_process(tmp_path):
    commits = ("--commit-dir", tmp_path, "--reset-limit", 1)
    reports = sharded_run("torch", "1@7,2@7", flags=commits)
    assert [(report["wrong"], report["size"]) for report in reports] == [({}, 4)] * 4


@pytest.mark.parametrize("passes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_without_batches_commit_their_slices_with_the_others(passes):
    reports = script_reports("uneven_commits_script.py", passes, "lost", flags=NONE_NEW)
    rows = [*range(12), *range(12, 12 + 8 * 3)]  # of ranks 0 and 1, and of rank 2's batches before the loss
    assert [report["rank"] for report in reports] == [0, 2]
    assert [(report["trained"], report["counts"]) for report in reports] == [(rows, [0.0, 1.0])] * 2


def test_a_new_rank_waits_until_all_have_batches():
    reports = script_reports("uneven_commits_script.py", 1, "replaced")
    assert [(report["rank"], report["size"]) for report in reports] == [(0, 3), (1, 3), (2, 3)]
    assert reports[0]["counts"] == reports[1]["counts"] == reports[2]["counts"]


@pytest.mark.parametrize(
    ("kills", "how", "left"),
    [
        ("0@7,2@20", "run", [1, 3]),
        ("1@5", "replaced", [0, 1, 2, 3]),
        pytest.param("1@5,2@5", "commits", [0, 1, 2, 3], marks=pytest.mark.nightly),  # a slice and its copy
        ("0@7,1@20,2@30", "run", [3]),
    ],
)
def test_slices_of_torch_in_a_function_of_elastic_run(kills, how, left, tmp_path):
    more = {"run": ("--reset-limit", 0), "replaced": (), "commits": ("--commit-dir", tmp_path, "--reset-limit", 1)}
    env, flags = {"CHOROS_SHARD_STATE": "1", "EXAMPLES": "600"}, ("-np", 4, "--min-np", 1, *more[how])
    reports = script_reports("torch_script.py", kills, "run" if how == "commits" else how, flags=flags, env=env)
    assert [report["rank"] for report in reports] == left
    assert [(report["size"], report["wrong"]) for report in reports] == [(len(left), {})] * len(left)
    assert {weight for report in reports for weight in report["weights"]} == {0}
    assert sum(report["held"] for report in reports) == pytest.approx(1, abs=0.01)


def test_new_ranks_of_different_folds_call_slices_as_the_others_do():
    reports = script_reports("folds_script.py", "1@0,2@1", env={"CHOROS_SHARD_STATE": "1"})
    assert reports == [{"rank": rank, "size": 3, "wrong": {}} for rank in range(3)]


def test_slices_of_torch_in_a_loop_of_ones_own_are_lost_with_a_rank():
    env = TORCH | {"CHOROS_SHARD_STATE": "1", "EXAMPLES": "600"}
    ended = run(*NONE_NEW, sys.executable, HERE / "torch_script.py", "1@5", "plain", env=env, warm=True)
    assert ended.code == 69
    assert re.search("optimizer's state .*: use\\s+hvd.elastic.run", ended.err), ended.err


@pytest.mark.parametrize("kills", ["0@7,2@20", pytest.param("1@8", marks=pytest.mark.nightly)])
def test_slices_of_optax_are_cut_from_commits_of_one_process(kills):
    flags = ("-np", 4, "--min-np", 1, "--reset-limit", 0)
    reports = script_reports("optax_script.py", kills, framework="jax", flags=flags)
    left = 4 - len(kills.split(","))
    assert [(report["wrong"], report["size"]) for report in reports] == [({}, left)] * left
    assert sum(report["held"] for report in reports) == pytest.approx(1, abs=0.01)


def sharded_run(framework, *arguments, flags=()):
    flags = ("-np", 4, "--min-np", 1, *(flags or (() if "replaced" in arguments else ("--reset-limit", 0))))
    return script_reports("sharded_run_script.py", *arguments, framework=framework, flags=flags)
