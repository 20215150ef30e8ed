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
from collections.abc import Callable
from typing import Any

import torch

from choros.elastic.retry import run
from choros.elastic.sampler import ElasticSampler
from choros.elastic.state import ObjectState, State
from choros.errors import HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError
from choros.parallel.objects import broadcast_object
from choros.torch import slice_commits
from choros.torch.optimizer import abandon_step
from choros.torch.sliced_state import ParameterSlices, slices_of
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
        if isinstance(self.value, torch.optim.Optimizer):
            abandon_step(self.value)
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        if isinstance(self.value, torch.nn.Module):
            broadcast_parameters(self.value.state_dict(), root_rank=0)
        elif isinstance(self.value, torch.optim.Optimizer):
            broadcast_optimizer_state(self.value, root_rank=0)
        else:
            self.value.load_state_dict(broadcast_object(self.value.state_dict(), name=type(self.value).__name__))
        self.save()


class _SlicedOptimizerHandler(StateHandler):
    """Handles an optimizer of whose state each rank has a slice: a rank saves its own, and a copy of another one's."""

    def __init__(self, value: Any, slices: ParameterSlices) -> None:
        super().__init__(value)
        self._slices = slices
        #: The state of one process, while it is that.
        self._whole = copy.deepcopy(value.state_dict()) if slices.is_whole else None

    @property
    def saved(self) -> Any:
        """The state of one process, for a commit on disk right after a ``save``: a call of this rank suffices."""
        return self.value.state_dict() if self._whole is None else self._whole

    @saved.setter
    def saved(self, state_dict: Any) -> None:
        self._whole = state_dict

    def save(self) -> None:
        self._whole = copy.deepcopy(self.value.state_dict()) if self._slices.is_whole else None
        if self._whole is None:
            slice_commits.save(self.value, self._slices)

    def restore(self) -> None:
        abandon_step(self.value)
        if self._whole is None:
            slice_commits.restore(self.value, self._slices)
        else:
            self.value.load_state_dict(copy.deepcopy(self._whole))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


def _optimizer_handler(value: Any) -> StateHandler:
    slices = slices_of(value)
    return _StateDictHandler(value) if slices is None else _SlicedOptimizerHandler(value, slices)


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.optim.Optimizer, _optimizer_handler),
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
        if name in self._handlers and value is not self._handlers[name].value:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copies all values."""
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
        for each in self._handlers.values():
            each.sync()
        super().sync()

    def committed(self) -> Any:
        """Returns what was saved of the values that have a ``state_dict``, and the objects."""
        handlers = {name: getattr(each, "saved", None) for name, each in self._handlers.items()}
        return {"handlers": handlers, "objects": super().committed()}

    def use(self, committed: Any) -> None:
        """Takes them."""
        for name, saved in committed["handlers"].items():
            if saved is not None:
                self._handlers[name].saved = saved  # type: ignore[attr-defined]
        super().use(committed["objects"])


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for cls, handler in _registry if isinstance(value, cls)), None)
