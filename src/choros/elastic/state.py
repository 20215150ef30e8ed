"""Horovod's states of elastic training: what a function needs to go on, committed in memory and on disk."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from choros.comm import Reduction, global_process_set
from choros.comm.context import rank
from choros.elastic import job
from choros.elastic.commit_store import CommitStore
from choros.elastic.job import HostUpdate
from choros.elastic.preemption import all_are_here, end_job, job_ends, leave_if_asked
from choros.errors import HostsUpdatedInterrupt
from choros.observe.progress import page
from choros.parallel.objects import broadcast_object, object_of_first

_PICKLED = "pickled state"


class State:
    """The base class of states; a state of your own implements ``save``, ``restore`` and ``sync``.

    Args:
        bcast_object: sends an object from rank 0 to all ranks.
        get_rank: returns the rank.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._update = HostUpdate.NONE
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0
        #: That of the function of ``elastic.run`` which was called with it last.
        self._store: CommitStore | None = None

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Adds functions without arguments that are called when the ranks have changed, before the next ``sync``.

        All ranks call them, new ones too, so they may communicate.

        Args:
            callbacks: for example one that scales the learning rate by ``hvd.size()``.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls the reset callbacks, after ``reset``."""
        self._update = HostUpdate.NONE
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = HostUpdate.ADDED) -> None:
        """Notes that hosts have changed, for the next ``check_host_updates``.

        Args:
            timestamp: Horovod's; has no effect.
            update_res: 1 if hosts were only removed, 2 if some were added.
        """
        del timestamp
        self._update = max(self._update, HostUpdate(update_res))

    def commit(self) -> None:
        """Saves the state in memory; in a function of ``elastic.run`` also on disk, if the job has a directory of
        commits; then ``check_host_updates``.

        All ranks must call it at the same step. A rank that was asked to end by SIGTERM or SIGUSR1 does it here.

        Raises:
            HostsUpdatedInterrupt: see ``check_host_updates``.
        """
        with page.counted_as("committed"):
            self._commit()
        leave_if_asked(one_by_one=True)
        self.check_host_updates()

    def _commit(self) -> None:
        self.save()
        self._commits += 1
        if self._store is not None and self._rank() == 0:
            self._store.write({_PICKLED: cloudpickle.dumps(self.committed())})

    def check_host_updates(self) -> None:
        """Raises on all ranks if one of them knows that hosts were added or will be removed; once all have batches.

        If the job was asked to end, the state is committed here, and all ranks end.

        Raises:
            HostsUpdatedInterrupt: it is so; its ``skip_sync`` says that none were added.
        """
        known = max(self._update, job.pending())
        communicator = global_process_set.communicator
        if job_ends() and all_are_here():
            end_job(self._commit)  # else some have joined the others, and come to the next call
        update = int(communicator.allreduce(np.array(int(known)), Reduction.MAX, name="hosts updated"))
        if update and not communicator.not_joined:  # else as above
            self._update = HostUpdate.NONE
            raise HostsUpdatedInterrupt(skip_sync=update == HostUpdate.REMOVED)

    def load(self) -> None:
        """Loads the last commit on disk, if there is one, on all ranks: any of them may be lost before ``sync``.

        All ranks must call it together.
        """
        store = self._store
        last = None if store is None else object_of_first(partial(store.load_last, own=True))
        if last is not None:
            self.use(cloudpickle.loads(last[_PICKLED]))
            self.restore()

    def committed(self) -> Any:
        """Returns what the last ``save`` has saved, to be pickled; ``None`` if the state is not written to disk."""
        return None

    def use(self, committed: Any) -> None:
        """Makes what ``committed`` has returned the last commit."""

    def save(self) -> None:
        """Saves the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Sets the state to that of the last ``save``, or ``sync``."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sends the state of rank 0 to all ranks, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepares for other ranks, before the reset callbacks; does nothing."""


class StateHandler(ABC):
    """Saves, restores and synchronises one attribute of a state.

    Attributes:
        value: the attribute.
        saved: what commits have of it; ``None``: nothing.
    """

    saved: Any = None

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def save(self) -> None:
        """Saves the value in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Sets it to what was saved last."""

    @abstractmethod
    def sync(self) -> None:
        """Sends that of rank 0 to all ranks."""

    def set_value(self, value: Any) -> None:
        """Takes another value in place of this one, and saves it."""
        self.value = value
        self.save()


class StateDictHandler(StateHandler):
    """Handles what has ``state_dict`` and ``load_state_dict``: others may refer to it, and it to others."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        """Copies the ``state_dict``."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Loads a copy of it."""
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Loads that of rank 0, and saves it."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name=type(self.value).__name__))
        self.save()


class ObjectState(State):
    """Objects, as attributes.

    Args:
        bcast_object: as for ``State``.
        get_rank: as for ``State``.
        kwargs: the objects, of types that can be pickled. ``save`` copies them. Of an ``ElasticSampler``, and of others
            with ``state_dict`` and ``load_state_dict``, it copies the ``state_dict``; the object stays the same.

    Example:
        >>> import choros
        >>> choros.init()
        >>> state = ObjectState(epoch=0)
        >>> state.epoch = 5
        >>> state.commit()
        >>> state.epoch = 6
        >>> state.restore()
        >>> state.epoch
        5
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        handlers = {name: self._handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: each for name, each in handlers.items() if each is not None}
        for name, each in self._handlers.items():
            setattr(self, name, each.value)
        self._saved = {name: value for name, value in kwargs.items() if name not in self._handlers}
        self._set_objects()

    def _handler_of(self, value: Any) -> StateHandler | None:
        methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
        return StateDictHandler(value) if all(map(callable, methods)) and not isinstance(value, type) else None

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)  # a subclass may set attributes before there are any
        if handler is not None and value is not handler.value:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copies the objects."""
        with self._all_or_none():
            for each in self._handlers.values():
                each.save()
            self._saved = self._copied()

    def restore(self) -> None:
        """Sets the attributes to copies of those of the last ``save``."""
        for each in self._handlers.values():
            each.restore()
        self._set_objects()

    def sync(self) -> None:
        """Sends the objects of rank 0 to all ranks, and saves them."""
        with self._all_or_none():
            for each in self._handlers.values():
                each.sync()
            if self._saved:
                self._saved = self._bcast_object(self._copied())
                self._set_objects()

    def _copied(self) -> dict[str, Any]:
        return copy.deepcopy({name: getattr(self, name) for name in self._saved})

    def _set_objects(self) -> None:
        for name, value in copy.deepcopy(self._saved).items():
            setattr(self, name, value)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """A context after which all is saved, or what was saved before, if a rank is lost meanwhile."""
        before = [(each, dict(vars(each))) for each in self._handlers.values()]
        saved = self._saved
        try:
            yield
        except BaseException:
            for each, values in before:
                vars(each).update(values)
            self._saved = saved
            raise

    def committed(self) -> Any:
        """Returns what was saved of the objects that have a ``state_dict``, and the others."""
        handlers = {name: each.saved for name, each in self._handlers.items()}
        return {"handlers": handlers, "objects": self._saved}

    def use(self, committed: Any) -> None:
        """Takes them."""
        for name, saved in committed["handlers"].items():
            if saved is not None:
                self._handlers[name].saved = saved
        self._saved = committed["objects"]
