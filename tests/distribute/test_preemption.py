"""Jobs that are asked to end, save, and resume later; the cases on two ranks are in ``preemption_cases.py``."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import choros
from choros import distribute, durations
from choros.distribute import preemption
from choros.distribute.preemption import PreemptionCheckpointHandler, TerminationConfig, watch
from choros.errors import ConfigError, StrategyError
from harness import FRAMEWORKS, Job, check_case, on
from launch.launched import Running

MODULE = "distribute.preemption_cases"
SCRIPT = Path(__file__).parent / "preemption_script.py"


@on(Job(2, FRAMEWORKS[0]), cases=MODULE)
def test_two_ranks(case: str, job: Job) -> None:
    """On one framework; TensorFlow if available, because it has its own checkpoints."""
    check_case(MODULE, case, job)


@pytest.mark.slow
def test_sigterm_to_one_rank_ends_all_and_they_resume(tmp_path: Path) -> None:
    command = ("-np", "2", sys.executable, SCRIPT, FRAMEWORKS[-1], tmp_path / "checkpoints")
    with Running(*command) as job:
        job.wait_for(2, "ready")
        (pid,) = re.findall(r"ready pid=(\d+) rank=1", job.output)
        os.kill(int(pid), signal.SIGTERM)
        ended = job.end()
        job.assert_nothing_left()
    assert ended.code == 42, ended.err
    first, second = re.findall(r"exits with 42 after (\d+)", ended.out)
    assert first == second
    with Running(*command, "5") as job:
        again = job.end()
    assert again.code == 0, again.err
    assert re.findall(r"resumed after (\d+)", again.out) == [first, second]


# ── one process ──────────────────────────────────────────────────────────────────────────────────


class Ended(Exception):
    pass


class Steps(list[int]):
    """Stores steps, and counts calls of ``save``."""

    saves = 0

    def save(self, path: str, *words: str) -> None:
        self.saves += 1
        Path(f"{path}.txt").write_text(" ".join([*map(str, self), *words]))

    def restore(self, path: str) -> None:
        self[:] = map(int, Path(f"{path}.txt").read_text().split())


@pytest.fixture(autouse=True)
def _leave() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == previous
    choros.shutdown()


def end() -> None:
    raise Ended


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_steps_are_counted_and_only_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    for begin in (0, 2, 4):
        steps = Steps()
        handler = PreemptionCheckpointHandler(None, steps, tmp_path, TerminationConfig(exit_fn=end))
        assert (handler.total_run_calls, steps) == (begin, list(range(begin)))
        left = tmp_path / f".unfinished.{os.uname().nodename}.x"  # of a job that was killed
        (left / "run-9").mkdir(parents=True)
        left.chmod(0o1700)
        assert handler.run(lambda number: number, 7) == 7
        steps.append(begin)
        steps.append(begin + 1)
        handler.save_checkpoint_if_preempted()
        send_sigterm()
        assert handler.total_run_calls == begin + 2
        with pytest.raises(Ended):
            handler.run(pytest.fail, "another step")
        assert [path.name for path in tmp_path.iterdir()] == [f"run-{begin + 2}"]


def test_a_second_request_before_any_step_keeps_the_checkpoint(tmp_path: Path) -> None:
    for saves in (1, 0):
        steps = Steps()
        handler = PreemptionCheckpointHandler(None, steps, tmp_path, TerminationConfig(exit_fn=end))
        send_sigterm()
        with pytest.raises(Ended):
            handler.run(pytest.fail)
        assert steps.saves == saves
        assert [path.name for path in tmp_path.iterdir()] == ["run-0"]


def test_the_process_exits_with_42_and_another_sigterm_does_not_end_it_sooner(tmp_path: Path) -> None:
    previous = signal.getsignal(signal.SIGTERM)
    handler = PreemptionCheckpointHandler(None, Steps(), tmp_path)
    with pytest.raises(SystemExit) as raised, handler.watch_preemption_scope():
        send_sigterm()
    assert raised.value.code == 42
    send_sigterm()  # would end this process
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # Python forgets handlers before a process has ended
    signal.signal(signal.SIGTERM, previous)


def test_exit_fn_may_return_and_training_continues(tmp_path: Path) -> None:
    ends: list[str] = []
    config = TerminationConfig(exit_fn=lambda: ends.append("ended"))
    handler = PreemptionCheckpointHandler(None, Steps(), tmp_path, config)
    send_sigterm()
    assert [handler.run(lambda: "step") for _ in range(3)] == ["step"] * 3
    assert ends == ["ended"]


def test_grace_period_saves_at_once_and_again_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds))  # each reading advances it by a second
    monkeypatch.setattr(preemption, "time", clock)
    steps = Steps()
    handler = PreemptionCheckpointHandler(None, steps, tmp_path, TerminationConfig(exit_fn=end, grace_period=60))
    handler.run(steps.append, 0)
    send_sigterm()
    with contextlib.suppress(Ended):
        for step in range(1, 60):
            handler.run(steps.append, step)
    assert steps.saves == 2
    assert 10 < len(steps) < 30  # three seconds per step; the reserve is three steps and checkpoints
    assert [path.name for path in tmp_path.iterdir()] == [f"run-{len(steps)}"]


def test_save_fn_is_called_in_place_of_save(tmp_path: Path) -> None:
    steps = Steps([1, 2])
    config = TerminationConfig(exit_fn=end, save_fn=lambda path, *words: steps.save(path, "3", *words))
    handler = PreemptionCheckpointHandler(None, steps, tmp_path, config)
    send_sigterm()
    with pytest.raises(Ended):
        handler.save_checkpoint_if_preempted("4")
    steps.restore(str(tmp_path / "run-1" / "checkpoint"))
    assert steps == [1, 2, 3, 4]


def test_a_watcher_is_polled_until_it_returns_true(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durations, "PREEMPTION_LOOK", 0.001)
    answers = iter([False, OSError("no route"), OSError("no route"), False, True])
    called_by: list[threading.Thread] = []
    answered = threading.Event()

    def watcher() -> bool:
        called_by.append(threading.current_thread())
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        if answer:
            answered.set()
        return answer

    recorded: list[bool] = []
    stop = watch(watcher, lambda: recorded.append(True))
    assert answered.wait(20)
    called_by[0].join(20)
    assert len(called_by) == 5
    assert recorded == [True]
    assert [record.getMessage() for record in caplog.records] == [
        "termination_watcher_fn failed, and will be called again: OSError: no route"
    ]
    stop()


def test_a_watcher_is_not_called_after_the_scope(tmp_path: Path) -> None:
    config = TerminationConfig(termination_watcher_fn=lambda: False)
    handler = PreemptionCheckpointHandler(None, Steps(), tmp_path, config)
    (thread,) = [each for each in threading.enumerate() if each.name == "choros-termination"]
    with handler.watch_preemption_scope():
        handler.run(lambda: None)
    thread.join(20)
    assert not thread.is_alive()


def test_a_failing_training_saves_nothing(tmp_path: Path) -> None:
    handler = PreemptionCheckpointHandler(None, Steps(), tmp_path)
    with pytest.raises(ZeroDivisionError), handler.watch_preemption_scope():
        handler.run(lambda: 1 / 0)
    assert not list(tmp_path.iterdir())


def test_invalid_uses_raise_errors_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"KerasCheckpoint\(model\), or an object with save\(path\)"):
        PreemptionCheckpointHandler(None, object(), tmp_path)
    with pytest.raises(ConfigError, match="checkpoint_dir is missing: pass the directory for checkpoints of Steps"):
        PreemptionCheckpointHandler(None, Steps())
    with pytest.raises(ConfigError, match="at least 0"):
        TerminationConfig(grace_period=-1)
    cluster = {"chief": ["a:1"], "worker": ["a:2"], "ps": ["a:3"]}
    resolver = distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="chief", task_id=0)
    with pytest.raises(StrategyError, match="write checkpoints on the chief only"):
        PreemptionCheckpointHandler(resolver, Steps(), tmp_path)
    errors: list[Exception] = []

    def in_a_thread() -> None:
        try:
            PreemptionCheckpointHandler(None, Steps(), tmp_path)
        except StrategyError as error:
            errors.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(60)
    assert "in the main thread only" in str(errors[0])


@pytest.mark.slow
@pytest.mark.skipif("tensorflow" not in FRAMEWORKS, reason="tensorflow is not among CHOROS_TEST_FRAMEWORKS")
def test_managers_of_tensorflow_and_its_own_handler_share_files(tmp_path: Path) -> None:
    import tensorflow as tf

    def job(step: int | None) -> tuple[int, int]:
        value = tf.Variable(0)
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(value=value), str(tmp_path), max_to_keep=2)
        handler = PreemptionCheckpointHandler(None, manager, None, TerminationConfig(exit_fn=end))
        begin = handler.total_run_calls, int(value)
        with handler.watch_preemption_scope():
            while step is not None:
                handler.run(value.assign_add, 10)
                if handler.total_run_calls == step:
                    send_sigterm()
        return begin

    for step in (2, 3):
        with pytest.raises(Ended):
            job(step)
    assert job(None) == (3, 30)
    value, runs = tf.Variable(0), tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(value=value, checkpointed_runs=runs)  # as in TensorFlow's handler
    checkpoint.restore(tf.train.latest_checkpoint(tmp_path)).assert_existing_objects_matched()
    assert (int(value), int(runs)) == (30, 3)
