"""The files of a strategy's models: written once, by one process for all that name the same path.

::

    model.save(path), keras.saving.save_model(model, path), tf.saved_model.save(model, path),
    tf.train.CheckpointManager(tf.train.Checkpoint(model=model), …).save()
        model, or the checkpoint, was created in a scope  ──► strategy.training.save ──► write_once
        otherwise                                         ──► the function itself

    process 0          process 1          process 2
    "a" ───────────────"a" ───────────────"b/tmp"      the paths are exchanged
    writes             waits              writes       the first process with a path writes it
    ok, or an error ── ok ─────────────── ok           all learn of an error; then all files exist

Files are usually written after the last scope is left, and by functions, so these stay replaced once one was
entered. Keras' files and SavedModels are then always complete: renamed when written (``training/files.py``).
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from choros.comm import Request, global_process_set
from choros.distribute.scope import enter_fit, in_fit, strategy_of
from choros.errors import StrategyError
from choros.observe import events
from choros.observe.events import Kind
from choros.parallel.objects import allgather_object
from choros.training.files import complete, complete_files, decide_writers
from choros.training.thread import doing, thread

#: How many objects deep the model of a checkpoint is searched: CheckpointManager → Checkpoint → model.
_DEPTH = 2
#: What a CheckpointManager knows of its checkpoints: the last one, and those that it may delete.
_OF_MANAGER = ("_latest_checkpoint", "_maybe_delete", "_last_preserved_timestamp")

#: What process 0 was to write in ``fit`` since the last collective: its number, the collectives before, and the call.
_of_first: list[tuple[int, int, Callable[[], Any]]] = []
#: The last error of writing in ``fit``, which a callback may catch.
_unwritten: list[BaseException] = []


def guard_saving() -> None:
    """Replaces the functions that write files, in all libraries that are loaded; the first time only."""
    decide_writers(_save)
    if "keras" in sys.modules:
        complete_files()
    if sys.modules.get("tensorflow") is not None:
        _guard_tensorflow()


@functools.cache
def _guard_tensorflow() -> None:
    import tensorflow as tf
    from tensorflow.python.saved_model import save

    complete(save, "save_and_return_nodes", "export_dir")
    _count_everywhere(tf.train.Checkpoint, "save")
    _count_everywhere(tf.train.Checkpoint, "write")
    _count_everywhere(tf.train.CheckpointManager, "save", of_manager=True)


def _save(saved: Any, write: Callable[[], Any], path: str) -> Any:
    """Writes as the strategy of ``saved`` decides; on a process that does not, returns ``None``."""
    training = _training_of(saved)
    if training is None:
        return write()
    results: list[Any] = []
    training.save(lambda: results.append(write()), path)  # results are not sent: not all can be pickled
    return results[0] if results else None


def _count_everywhere(owner: Any, name: str, *, of_manager: bool = False) -> None:
    """Replaces a function of TensorFlow's checkpoints or their manager, so that all processes count what is saved."""
    own: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(own)

    @functools.wraps(own)
    def save(saved: Any, *args: Any, **kwargs: Any) -> Any:
        files = saved.directory if of_manager else signature.bind(saved, *args, **kwargs).arguments["file_prefix"]
        training = _training_of(saved)
        if training is None or not isinstance(files, (str, os.PathLike)):
            return own(saved, *args, **kwargs)
        checkpoint = saved.checkpoint if of_manager else saved

        def write() -> tuple[Any, ...]:
            path = own(saved, *args, **kwargs)
            return path, int(checkpoint.save_counter), {name: vars(saved)[name] for name in _OF_MANAGER if of_manager}

        written = training.save(write, os.fspath(files))
        path, number, state = written or (None, int(checkpoint.save_counter) + 1, {})  # in fit, the others get none
        if name == "save":
            checkpoint.save_counter.assign(number)
        vars(saved).update(state)
        return path

    setattr(owner, name, save)


def _training_of(saved: Any) -> Any:
    """Returns ``training`` of the strategy in whose scope ``saved``, or an object that it holds, was created."""
    strategy = _strategy_within(saved, _DEPTH) or _strategy_of_variables(saved)
    return None if strategy is None else strategy.training


def _strategy_within(saved: Any, depth: int) -> Any:
    strategy = strategy_of(saved)
    if strategy is not None or depth == 0:
        return strategy
    held = (_strategy_within(each, depth - 1) for each in getattr(saved, "__dict__", {}).values())
    return next((each for each in held if each is not None), None)


def _strategy_of_variables(saved: Any) -> Any:
    """The strategy of what TensorFlow would write: its modules have no mark of their own, but their variables do."""
    tf: Any = sys.modules.get("tensorflow")
    root = getattr(saved, "checkpoint", saved)
    if tf is None or not isinstance(root, (tf.train.Checkpoint, tf.Module)):
        return None
    held = map(strategy_of, tf.train.TrackableView(root).descendants())
    return next((each for each in held if each is not None), None)


def write_once(write: Callable[[], Any], path: str = "") -> Any:
    """Calls ``write`` on the first process of those with this ``path`` and returns its picklable result; all wait.
    In ``fit`` only process 0 writes, and the others return ``None``, as a callback may write on one only. If one that
    writes is lost in an elastic job, another one does. A call within ``write`` only calls its own.
    """
    if thread.writing_files:
        return write()
    communicator = global_process_set.communicator
    if in_fit():
        if communicator.rank == 0:
            return _write_in_fit(write, path)
        if communicator.elastic:
            known = [each for each in _of_first if each[1] == communicator.collectives]
            by_first = partial(_write_in_fit, write, path)
            _of_first[:] = [*known, (communicator.launched[0], communicator.collectives, by_first)]
        return None
    while True:
        paths = allgather_object(path, name="files to write")
        members = communicator.launched
        writers = {each: members[paths.index(each)] for each in paths}
        result: Any = None
        problem: Exception | None = None
        if members[communicator.rank] == writers[path]:
            try:
                with enter_fit():  # objects that saving creates must not start collectives
                    result = _write(write, path)
            except Exception as error:  # noqa: BLE001  (raised below, once the others have received it)
                problem = error
        reported = None if problem is None else f"{type(problem).__name__}: {problem}"
        outcomes = allgather_object((path, result, reported), name="files written")
        if all(writers[each] in communicator.launched for each, _, _ in outcomes):
            break  # else a writer was lost, maybe before it has written
    if problem is not None:
        raise problem
    for rank, (given, _, failure) in enumerate(outcomes):
        if failure is not None:
            raise StrategyError(f"process {rank}, which writes {given or 'for all processes'}, failed: {failure}")
    return outcomes[communicator.launched.index(writers[path])][1]


def write_for_lost(meet: Callable[[], None]) -> None:
    """Calls ``meet``, in which all meet after their callbacks for the end of an epoch. If process 0 is lost by then,
    the next one writes what that was to write in them: others take it for written, such as the best model.
    """
    communicator, given = global_process_set.communicator, _of_first[:]
    begun = communicator.collectives
    _of_first.clear()
    meet()
    for first, collectives, write in given:
        if collectives == begun and first not in communicator.launched and communicator.rank == 0:
            write()


def _write_in_fit(write: Callable[[], Any], path: str) -> Any:
    try:
        return _write(write, path)
    except OSError as error:
        _unwritten[:] = [error]
        raise


@contextmanager
def ended_if_unwritten() -> Iterator[None]:
    """A context of ``fit``: if it ends on process 0 of an elastic job because that cannot write a file, it ends on all,
    as the next one could not write either.
    """
    try:
        yield
    except OSError as error:
        communicator = global_process_set.communicator
        cause: BaseException | None = error
        while cause is not None and cause not in _unwritten:
            cause = cause.__context__
        if cause is not None and communicator.elastic:
            communicator.agree(Request("write"), problem=error)
        raise
    finally:
        _unwritten.clear()


def _write(write: Callable[[], Any], path: str) -> Any:
    with doing("writing_files"):
        result = write()
    events.emit(Kind.CHECKPOINT, path)
    return result
