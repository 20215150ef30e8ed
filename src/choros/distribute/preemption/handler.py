"""Saving before the machine is taken away: all processes of a job at the same step.

::

    process 0                        process 1
    run(step): told? 0               run(step): told? 0       each call begins with one control message of each
      step 41                          step 41
                            SIGTERM ──►  …                    noted, and nothing else
    run(step): told? 0 ◄────────────►run(step): told? 2       (1) all learn of it before the same step
    writes run-41 ──────────────────►waits                    (2) one writes; all wait until it has
    exit_fn()                        exit_fn()                (3) sys.exit(42), for whoever starts them again

    restores run-41                  restores run-41          (4) the next job goes on with step 42

With a grace period the number is first a 1, upon which all save and go on, and a 2 when the time is nearly over.
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

#: Of the time that is left, so many steps and checkpoints are kept in reserve.
_RESERVE = 3


class _Stage(enum.IntEnum):
    """What a process says before each step; the highest number counts."""

    TRAINING = 0
    #: Told to end, with time left.
    TOLD = 1
    #: Told to end, now.
    ENDING = 2


@final
class PreemptionCheckpointHandler:
    """Saves a checkpoint when any process of the job is told to end (``tf.distribute.experimental``'s name).

    Making one restores the latest checkpoint, if there is one. From then on SIGTERM does not end this process at once:
    before the next step all processes learn of it, process 0 writes, and all exit. Started again, the job goes on where
    it was::

        checkpoint = distribute.experimental.KerasCheckpoint(model, optimizer)
        handler = distribute.experimental.PreemptionCheckpointHandler(None, checkpoint, "checkpoints")
        with handler.watch_preemption_scope():
            for step in range(handler.total_run_calls, STEPS):
                loss = handler.run(train_step, batch_of(step))

    ``chorosrun`` passes SIGTERM on to all processes, and gives them ``--grace-period`` seconds to end. All processes
    must call ``run`` alike: a call costs one control message more than the function, some 10 µs over MPI on one host.

    Args:
        cluster_resolver: what the strategy was given, or ``strategy.cluster_resolver``; tells the workers' addresses if
            the process has not joined its job yet.
        checkpoint_or_checkpoint_manager: a ``tf.train.Checkpoint`` or ``tf.train.CheckpointManager``; on every
            framework a ``KerasCheckpoint``, or any object with ``save(path)`` and ``restore(path)``, which may add a
            suffix to the path. Process 0 alone saves, all restore.
        checkpoint_dir: where, for all but a manager: on a file system that all hosts share. The last one is kept.
        termination_config: how processes are told, and how they end.

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
                "PreemptionCheckpointHandler is for processes that train in step, as those of ParameterServerStrategy "
                "do not: have the chief alone write checkpoints, by keras.callbacks.BackupAndRestore in fit, or by "
                "model.save_weights after ClusterCoordinator.join()."
            )
        config = termination_config or TerminationConfig()
        if not is_initialized():
            join(cluster_resolver)
        self._store = store_of(checkpoint_or_checkpoint_manager, checkpoint_dir, config.save_fn)
        self._exit = config.exit_fn or _exit
        self._grace = config.grace_period or 0.0
        self._stage = _Stage.TRAINING
        self._seconds = {"step": 0.0, "save": 0.0}
        self._runs = self._restored()
        self._notice = Notice(config.termination_watcher_fn)

    @property
    def total_run_calls(self) -> int:
        """How many calls of ``run`` or ``save_checkpoint_if_preempted`` have been done, before restarts too."""
        return self._runs

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Saves and exits if any process has been told to end; else calls the function.

        Args:
            distributed_train_function: one step, of all processes together.
            args: for it; likewise ``kwargs``.

        Returns:
            What it returned.
        """
        self._look()
        with self._timed("step"):
            result = distributed_train_function(*args, **kwargs)
        self._runs += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Counts a step, which the caller has done; saves and exits if any process has been told to end.

        In place of ``run``. Within Keras' ``fit``, call it at the ends of epochs, which all processes reach.

        Args:
            args: for the checkpoint's or its manager's ``save``; likewise ``kwargs``.
        """
        self._runs += 1
        self._look(*args, **kwargs)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """The block of the training: at its end all look once more, and SIGTERM does again what it did before.

        After it, this handler watches no longer.
        """
        with self._watched():
            yield
            self._look()

    def _restored(self) -> int:
        """Takes back the latest checkpoint; the steps that had been done."""
        found = allgather_object(self._store.latest)
        if len(set(found)) > 1:
            raise StrategyError(
                f"the processes find different checkpoints: {', '.join(map(str, found))}. checkpoint_dir must be the "
                "same for all, on a file system that all hosts share."
            )
        return self._store.restore()

    def _look(self, *args: Any, **kwargs: Any) -> None:
        """Does what is to be done if any process has been told to end."""
        if self._stage is _Stage.ENDING:  # exit_fn has returned
            return
        stage = _highest(self._own_stage())
        if stage <= self._stage:
            return
        self._stage = stage
        with self._timed("save"):
            write_once(lambda: self._store.save(self._runs, *args, **kwargs))
            global_process_set.communicator.barrier(name="checkpoint")  # in fit, write_once does not wait
        if stage is _Stage.ENDING:
            with self._watched():
                self._exit()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Watches no longer after the block, unless the process exits: no other SIGTERM is to end it sooner."""
        exits = False
        try:
            yield
        except SystemExit:
            exits = True
            raise
        finally:
            if not exits:
                self._notice.stop()

    def _own_stage(self) -> _Stage:
        age = self._notice.age
        if age is None:
            return _Stage.TRAINING
        reserve = _RESERVE * sum(self._seconds.values())
        return _Stage.TOLD if age + reserve < self._grace else _Stage.ENDING

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self._seconds[what] = time.monotonic() - begin


def _highest(stage: _Stage) -> _Stage:
    """The highest of all processes' stages."""
    if "jax" in sys.modules:
        import jax

        jax.effects_barrier()  # a step that still runs may have collectives ahead of it
    communicator = global_process_set.communicator
    with communicator.exclusive():
        return _Stage(max(communicator.agree(Request("check for preemption"), value=stage)))


def _exit() -> NoReturn:
    sys.exit(42)
