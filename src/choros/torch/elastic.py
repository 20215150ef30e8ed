"""Horovod's elastic API for PyTorch.

::

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):
            for index, (x, y) in enumerate(loader):              # DataLoader(dataset, sampler=sampler, …)
                step(x, y)
                state.sampler.record_batch(index, batch_size)
                if index % 10 == 0:
                    state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    train(hvd.elastic.TorchState(model, optimizer, sampler=hvd.elastic.ElasticSampler(dataset), epoch=0))
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from choros.elastic.retry import run
from choros.elastic.sampler import ElasticSampler
from choros.elastic.state import ObjectState, State
from choros.errors import HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError
from choros.parallel.objects import broadcast_object
from choros.torch import slice_commits
from choros.torch.messages import on_host
from choros.torch.optimizer import abandon_step
from choros.torch.sliced_state import SavedSlices, slices_of
from choros.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "ElasticSampler",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]


class StateHandler:
    """Saves, restores and synchronises one attribute of a ``TorchState``.

    Args:
        value: the attribute.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Saves the value in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Sets it to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Sends that of rank 0 to all ranks."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Takes another value in place of this one, and saves it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles what has a ``state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        if isinstance(self.value, torch.nn.Module):
            broadcast_parameters(self.value.state_dict(), root_rank=0)
        else:
            self.value.load_state_dict(broadcast_object(self.value.state_dict(), name=type(self.value).__name__))
        self.save()


class _OptimizerHandler(_StateDictHandler):
    """Handles an optimizer; of slices of its state, a rank saves its own, and a copy of another one's."""

    @property
    def saved(self) -> Any:
        """The state of one process, for a commit on disk right after a ``save``: a call of this rank suffices."""
        return self.value.state_dict() if isinstance(self._saved, SavedSlices) else self._saved

    @saved.setter
    def saved(self, state_dict: Any) -> None:
        self._saved = state_dict

    def save(self) -> None:
        slices = slices_of(self.value)
        if slices is None or slices.is_whole:
            super().save()
        else:
            self._saved = slice_commits.save(self.value, slices)

    def restore(self) -> None:
        abandon_step(self.value)
        if isinstance(self._saved, SavedSlices):
            slice_commits.restore(self.value, self._saved)
        else:
            super().restore()

    def sync(self) -> None:
        with slice_commits.using(self.value, self._saved):
            broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.optim.Optimizer, _OptimizerHandler),
    *((kind, _StateDictHandler) for kind in (torch.nn.Module, torch.optim.lr_scheduler.LRScheduler, ElasticSampler)),
]


def get_handler_registry() -> list[tuple[type, Callable[[Any], StateHandler]]]:
    """Returns the classes whose instances have handlers, with those; the first that fits is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, Callable[[Any], StateHandler]]]) -> None:
    """Sets the classes whose instances have handlers, with those."""
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """The state of a loop of PyTorch.

    Args:
        model: a module.
        optimizer: its optimizer, which may be distributed.
        kwargs: further modules, optimizers, schedulers of the learning rate and ``ElasticSampler``; other objects are
            those of an ``ObjectState``. All are attributes of the state.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(1, 1)
        >>> state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
        >>> state.commit()
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler_of(value) for name, value in values.items()}
        object.__setattr__(self, "_handlers", {name: each for name, each in handlers.items() if each is not None})
        for name, each in self._handlers.items():
            object.__setattr__(self, name, each.value)
        super().__init__(**{name: value for name, value in values.items() if name not in self._handlers})

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)  # a subclass may set attributes before there are any
        if handler is not None and value is not handler.value:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copies all values."""
        with self._all_or_none():
            for each in self._handlers.values():
                each.save()
            super().save()

    def restore(self) -> None:
        """Sets all values to those of the last ``save``."""
        for each in self._handlers.values():
            each.restore()
        super().restore()

    def sync(self) -> None:
        """Sends the values of rank 0 to all ranks, and saves them."""
        with self._all_or_none():
            for each in self._handlers.values():
                each.sync()
            super().sync()

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
        """Returns what was saved of the values that have a ``state_dict``, and the objects."""
        handlers = {name: on_host(getattr(each, "saved", None)) for name, each in self._handlers.items()}
        return {"handlers": handlers, "objects": super().committed()}

    def use(self, committed: Any) -> None:
        """Takes them."""
        for name, saved in committed["handlers"].items():
            if saved is not None:
                self._handlers[name].saved = saved  # type: ignore[attr-defined]
        super().use(committed["objects"])


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for cls, handler in _registry if isinstance(value, cls)), None)
