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

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, final

from choros.comm import Request, global_process_set, is_initialized
from choros.distribute.cluster_resolver import TFConfigClusterResolver
from choros.distribute.joining import join
from choros.distribute.preemption.checkpoint_store import store_of
from choros.distribute.preemption.termination import Notice, TerminationConfig
from choros.distribute.writing import write_once
from choros.errors import StrategyError
from choros.parallel.objects import allgather_object

__all__ = ["PreemptionCheckpointHandler"]

#: The number of steps and checkpoints for which time is reserved before the grace period ends.
_RESERVE = 3


class _PreemptionStage(enum.IntEnum):
    """The message of a process before each step; the highest one counts."""

    TRAINING = 0
    #: Must end, with time left.
    NOTIFIED = 1
    #: Must end now.
    ENDING = 2


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
        self._exit = config.exit_fn or _exit
        self._grace = config.grace_period or 0.0
        self._stage = _PreemptionStage.TRAINING
        self._seconds = {"step": 0.0, "save": 0.0}
        self._runs = self._restored()
        self._notice = Notice(config.termination_watcher_fn)

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
        if self._stage is _PreemptionStage.ENDING:  # exit_fn has returned
            return
        stage = _highest(self._local_stage())
        if stage <= self._stage:
            return
        self._stage = stage
        with self._timed("save"):
            write_once(lambda: self._store.save(self._runs, *args, **kwargs))
            global_process_set.communicator.barrier(name="checkpoint")  # in fit, write_once does not wait
        if stage is _PreemptionStage.ENDING:
            with self._watching():
                self._exit()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Stops watching after the block, unless the process exits: then another SIGTERM must not end it sooner."""
        exits = False
        try:
            yield
        except SystemExit:
            exits = True
            raise
        finally:
            if not exits:
                self._notice.stop()

    def _local_stage(self) -> _PreemptionStage:
        age = self._notice.age
        if age is None:
            return _PreemptionStage.TRAINING
        reserve = _RESERVE * sum(self._seconds.values())
        return _PreemptionStage.NOTIFIED if age + reserve < self._grace else _PreemptionStage.ENDING

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._seconds[what] = time.monotonic() - begin


def _highest(stage: _PreemptionStage) -> _PreemptionStage:
    """Returns the highest stage of all processes."""
    if sys.modules.get("jax"):
        import jax

        jax.effects_barrier()  # a step that still runs may have collectives left to do
    communicator = global_process_set.communicator
    stages = communicator.atomic(lambda: communicator.agree(Request("check for preemption"), value=stage))
    return _PreemptionStage(max(stages))


def _exit() -> NoReturn:
    sys.exit(42)
