"""Checkpoints on preemption: all processes of a job save at the same step, and exit.

::

    process 0                        process 1
    run(step): stage 0               run(step): stage 0       each call first exchanges one control message
      step 41                          step 41
                            SIGTERM ──►  …                    recorded; the step goes on
    run(step): stage 0 ◄────────────►run(step): stage 2       (1) all receive it before the same step
    writes run-41 ──────────────────►waits                    (2) process 0 writes; all wait
    exit_fn()                        exit_fn()                (3) sys.exit(42): the exit code requests a restart

    restores run-41                  restores run-41          (4) the next job continues with step 42

With a grace period the stage is first 1: all save and continue. It is 2 when the period is nearly over.
"""

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from choros import durations
from choros.comm import Request, global_process_set, is_initialized
from choros.distribute.checkpoints import store_of
from choros.distribute.cluster_resolver import TFConfigClusterResolver
from choros.distribute.job import join
from choros.distribute.saving import write_once
from choros.distribute.variables import settle_variables
from choros.elastic.preemption import handle, ignore_signals
from choros.errors import ConfigError, StrategyError
from choros.parallel.objects import allgather_object

#: The number of steps and checkpoints for which time is reserved before the grace period ends.
_RESERVE = 3
_log = logging.getLogger("choros")


@final
@dataclass(frozen=True)
class TerminationConfig:
    """How a job detects that it must end, and how it ends (``tf.distribute.experimental.TerminationConfig``).

    Attributes:
        termination_watcher_fn: polled once a second, in a separate thread; returns whether this process is going to be
            ended, for example from a cloud's metadata server. ``None`` waits for SIGTERM instead.
        exit_fn: called on every process after the last checkpoint is written. ``None`` is ``sys.exit(42)``.
        grace_period: the seconds between the request and the actual end of a process. Training continues meanwhile: a
            checkpoint is written at once, and another one shortly before the period is over. ``None`` is 0.
        save_fn: replaces the checkpoint's or its manager's ``save``, with the same arguments, on process 0.

    Raises:
        ConfigError: the grace period is negative or not a number.

    Example:
        >>> import sys
        >>> config = TerminationConfig(exit_fn=lambda: sys.exit(75), grace_period=3600)
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None and not self.grace_period >= 0:
            raise ConfigError(
                f"TerminationConfig(grace_period={self.grace_period!r}): expected seconds of at least 0, or None."
            )


def watch(watcher: Callable[[], bool] | None, record: Callable[[], None]) -> Callable[[], None]:
    """Calls ``record`` when this process is requested to end, until the returned function is called, in this thread.
    Asks a watcher each second, or takes SIGTERM, whose other effects are suppressed: only in the main thread.
    """
    if watcher is not None:
        stopped = threading.Event()
        target = partial(_poll, watcher, record, stopped)
        threading.Thread(target=target, name="choros-termination", daemon=True).start()
        return stopped.set
    if threading.current_thread() is not threading.main_thread():
        raise StrategyError(
            "PreemptionCheckpointHandler was created in a thread, but Python handles SIGTERM in the main thread "
            "only: create it there, or pass TerminationConfig(termination_watcher_fn=…)."
        )
    return handle([signal.SIGTERM], lambda *_: record())


def _poll(watcher: Callable[[], bool], record: Callable[[], None], stopped: threading.Event) -> None:
    warned = False
    while not stopped.is_set():
        try:
            if watcher():
                record()
                return
        except Exception as error:  # noqa: BLE001  (one failure must not end the training)
            if not warned:
                _log.warning(
                    "termination_watcher_fn failed, and will be called again: %s: %s", type(error).__name__, error
                )
            warned = True
        stopped.wait(durations.PREEMPTION_LOOK)


#: What a process says before each step; the highest counts: must end, with time left or now.
_TRAINING, _NOTIFIED, _ENDING = range(3)


@final
class PreemptionCheckpointHandler:
    """Saves a checkpoint when any process of the job is asked to end (``tf.distribute.experimental``'s name).

    The constructor restores the latest checkpoint, if there is one. Afterwards SIGTERM does not end this process at
    once: before the next step all processes receive the request, process 0 writes, and all exit. Started again, the job
    continues from the checkpoint::

        checkpoint = distribute.experimental.KerasCheckpoint(model, optimizer)
        handler = distribute.experimental.PreemptionCheckpointHandler(None, checkpoint, "checkpoints")
        with handler.watch_preemption_scope():
            for step in range(handler.total_run_calls, STEPS):
                loss = handler.run(train_step, batch_of(step))

    ``chorosrun`` passes SIGTERM on to all processes, and gives them ``--grace-period`` seconds to end. All processes
    must call ``run`` in step: a call adds one control message to the function, about 10 µs over MPI on one host.

    Args:
        cluster_resolver: the strategy's, ``strategy.cluster_resolver``; provides the workers' addresses if the process
            has not joined its job yet.
        checkpoint_or_checkpoint_manager: a ``tf.train.Checkpoint`` or ``tf.train.CheckpointManager``; on every
            framework a ``KerasCheckpoint``, or any object with ``save(path)`` and ``restore(path)``, which may add a
            suffix to the path. Only process 0 saves; all restore.
        checkpoint_dir: the directory, on a file system that all hosts share; ``None`` for a manager. Only the latest
            checkpoint is kept.
        termination_config: how requests to end are detected, and how processes end.

    Raises:
        ConfigError: this checkpoint cannot be written, or ``checkpoint_dir`` is missing.
        StrategyError: the job has parameter servers; the processes do not find the same checkpoint; or, without a
            ``termination_watcher_fn``, this is not the main thread.

    Example:
        >>> import os, pathlib, signal, tempfile
        >>> class Steps(list):
        ...     def save(self, path):
        ...         pathlib.Path(path).write_text(repr(self))
        ...     def restore(self, path):
        ...         self[:] = eval(pathlib.Path(path).read_text())
        >>> def job(directory):
        ...     steps = Steps()
        ...     handler = PreemptionCheckpointHandler(None, steps, directory)
        ...     with handler.watch_preemption_scope():
        ...         for step in range(handler.total_run_calls, 4):
        ...             handler.run(steps.append, step)
        ...             if steps == [0, 1]:
        ...                 os.kill(os.getpid(), signal.SIGTERM)
        ...     return steps
        >>> directory = tempfile.TemporaryDirectory()
        >>> job(directory.name)
        Traceback (most recent call last):
        SystemExit: 42
        >>> os.listdir(directory.name)
        ['run-2']
        >>> job(directory.name)
        [0, 1, 2, 3]
        >>> directory.cleanup()
        >>> _ = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the first job's process would have ended
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: Any = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        if "ps" in resolver.cluster_spec().jobs:
            raise StrategyError(
                "PreemptionCheckpointHandler is for synchronous training, unlike that of ParameterServerStrategy: "
                "write checkpoints on the chief only, by keras.callbacks.BackupAndRestore in fit, or by "
                "model.save_weights after ClusterCoordinator.join()."
            )
        config = termination_config or TerminationConfig()
        if not is_initialized():
            join(cluster_resolver)
        self._store = store_of(checkpoint_or_checkpoint_manager, checkpoint_dir, config.save_fn)
        self._exit = config.exit_fn or (lambda: sys.exit(42))
        self._grace = config.grace_period or 0.0
        self._stage = _TRAINING
        self._seconds = {"step": 0.0, "save": 0.0}
        self._runs = self._restored()
        self._requested_at: float | None = None
        self._stop_watching = watch(config.termination_watcher_fn, self._record)

    @property
    def total_run_calls(self) -> int:
        """The number of calls of ``run`` or ``save_checkpoint_if_preempted``, including those before restarts."""
        return self._runs

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves and exits if any process has been asked to end; else calls the function.

        Args:
            distributed_train_function: one step of all processes together.
            args: its positional arguments; likewise ``kwargs``.

        Returns:
            The result of the function.
        """
        self._check()
        with self._timed("step"):
            result = distributed_train_function(*args, **kwargs)
        self._runs += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Counts a step that the caller has run; saves and exits if any process has been asked to end.

        An alternative to ``run``. Within Keras' ``fit``, call it at the ends of epochs, which all processes reach.

        Args:
            args: positional arguments of the checkpoint's or its manager's ``save``; likewise ``kwargs``.
        """
        self._runs += 1
        self._check(*args, **kwargs)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """The block of the training: at its end all processes check once more.

        Afterwards this handler no longer watches, and SIGTERM's previous handler is restored.
        """
        with self._watching():
            yield
            self._check()

    def _restored(self) -> int:
        """Restores the latest checkpoint; returns the number of completed steps."""
        found = allgather_object(self._store.latest)
        if len(set(found)) > 1:
            raise StrategyError(
                f"the processes find different checkpoints: {', '.join(map(str, found))}. checkpoint_dir must be the "
                "same for all, on a file system that all hosts share."
            )
        return self._store.restore()

    def _check(self, *args: Any, **kwargs: Any) -> None:
        """Saves, and exits if it is time, if any process has been asked to end."""
        if self._stage == _ENDING:  # exit_fn has returned
            return
        if sys.modules.get("jax"):
            import jax

            jax.effects_barrier()  # a step that still runs may have collectives left to do
        communicator, own = global_process_set.communicator, self._own_stage()
        stage = max(communicator.agree(Request("check for preemption"), value=own))
        if stage <= self._stage:
            return
        self._stage = stage
        with self._timed("save"):
            settle_variables()
            write_once(lambda: self._store.save(self._runs, *args, **kwargs))
            communicator.barrier(name="checkpoint")  # in fit, write_once does not wait
        if stage == _ENDING:
            with self._watching():
                self._exit()

    def _record(self) -> None:
        if self._requested_at is None:
            self._requested_at = time.monotonic()

    def _own_stage(self) -> int:
        if self._requested_at is None:
            return _TRAINING
        age, reserve = time.monotonic() - self._requested_at, _RESERVE * sum(self._seconds.values())
        return _NOTIFIED if age + reserve < self._grace else _ENDING

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Stops watching after the block, unless the process exits: then another SIGTERM must not end it sooner."""
        try:
            yield
        finally:
            if isinstance(sys.exception(), SystemExit):
                ignore_signals()
            else:
                self._stop_watching()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._seconds[what] = time.monotonic() - begin
