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

import warnings
from collections.abc import Callable
from typing import Any

import torch

from choros.comm import global_process_set
from choros.elastic.retry import run
from choros.elastic.sampler import ElasticSampler
from choros.elastic.state import ObjectState, State, StateDictHandler, StateHandler
from choros.errors import HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError
from choros.torch import slice_commits
from choros.torch.division import on_host
from choros.torch.optimizer import abandon_step, is_amid_update
from choros.torch.sliced_state import SavedSlices, slices_of
from choros.torch.state import broadcast_optimizer, broadcast_parameters

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


_AMID = (
    "this commit is between the backward passes of one step of an optimizer, and lacks their gradients: if training "
    "goes on from it, what a sampler has recorded of these passes is in no step. Call record_batch() and commit() "
    "after step()."
)


class _ModuleHandler(StateDictHandler):
    """Handles a module, whose tensors are sent as they are."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class _OptimizerHandler(StateDictHandler):
    """Handles an optimizer; of slices of its state, a rank saves its own, and a copy of another one's."""

    @property
    def saved(self) -> Any:
        """The state of one process, for a commit on disk right after a ``save``: a call of this rank suffices."""
        return self.value.state_dict() if isinstance(self._saved, SavedSlices) else self._saved

    @saved.setter
    def saved(self, state_dict: Any) -> None:
        self._saved = state_dict

    def save(self) -> None:
        if is_amid_update(self.value):
            warnings.warn(_AMID, stacklevel=2)
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
        broadcast_optimizer(self.value, 0, global_process_set, self._saved)
        self.save()


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.optim.Optimizer, _OptimizerHandler),
    (torch.nn.Module, _ModuleHandler),
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
        kwargs: further modules and optimizers; other objects, as schedulers of the learning rate, are those of an
            ``ObjectState``. All are attributes of the state.

    Example:
        >>> import torch, choros.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(1, 1)
        >>> state = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0)
        >>> state.commit()
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)

    def _handler_of(self, value: Any) -> StateHandler | None:
        registered = next((handler for cls, handler in _registry if isinstance(value, cls)), None)
        return registered(value) if registered else super()._handler_of(value)

    def committed(self) -> Any:
        """Returns what was saved, with tensors in host memory."""
        given = super().committed()
        return {**given, "handlers": on_host(given["handlers"])}
