"""What torch's hooks of ``step`` do for a distributed optimizer: reduce gradients before it, or combine its changes.

Each rank may have a slice of the state. Two ranks, of which rank 1 has no more batches and has joined: it makes the
updates of its slices with the others' gradients and settings, such as the learning rate::

    rank 0                                      rank 1
    gradients  ── reducescatter, with zeros ──  keeps its items
    settings   ───────────────────────────────► and, after synchronize(), the gradients as the user has clipped them
    update of its slices                        update of its slices
    parameters ────────── allgather ──────────  the same
"""

import itertools
import numbers
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any, final

import numpy as np
import torch

from choros.comm import ProcessSet, Reduction, Request
from choros.errors import ConfigError
from choros.parallel.compression import Compressor
from choros.parallel.identical import Comparison, check_identical
from choros.parallel.ops import grouped_allreduce
from choros.parallel.reduce.gradients import Gradient
from choros.parallel.reduce.slices import LOADED, check_loaded, log_memory
from choros.parallel.reduce.torch_backward import BackwardExchange, compare_parameters
from choros.torch.division import decoded, encoded, on_host, trained
from choros.torch.sliced_state import ParameterSlices, settings_of, use_settings

_ADVICE = (
    "Start all ranks from the same values: call broadcast_parameters(model.state_dict(), root_rank=0) and "
    "broadcast_optimizer_state(optimizer, root_rank=0) before training, and in a function of hvd.elastic.run give the "
    "model, too, to TorchState."
)

_SETTINGS_ADVICE = (
    "Give all ranks identical settings: pass ReduceLROnPlateau the mean of their losses, hvd.allreduce(loss), and call "
    "broadcast_optimizer_state(optimizer, root_rank=0) if one rank alone resumes."
)
_NOT_AGAIN = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): Horovod would "
    "reduce the gradients again, choros does not. Write: with optimizer.skip_synchronize(): optimizer.step()."
)
#: The code of torch's function that calls ``step`` and its hooks, and the stack level of its caller in ``before_step``.
_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_CALLER = 4
_created = itertools.count()


@final
class SlicedStep:
    """What happens around torch's own ``step`` of one optimizer."""

    def __init__(self, slices: ParameterSlices, exchange: BackwardExchange) -> None:
        self.slices = slices
        self._exchange = exchange
        #: This rank's items of the gradients of the step.
        self._items: list[Any] | None = None
        #: The items that a rank that has joined has received.
        self._received: list[Gradient] = []
        #: If others have joined, the ranks that have batches, in a step of these.
        self._active: tuple[int, ...] = ()
        self._has_joined = False

    @property
    def _request(self) -> Request:
        return Request("settings of the optimizer", self.slices.text, self.slices.name)

    def scatter(self, optimizer: Any) -> None:
        """Reduces the gradients, of which this rank receives its items."""
        parameters = trained(optimizer)
        self.slices.divide(optimizer)
        self._items = self._exchange.scatter(parameters, [parameter.grad for parameter in parameters])

    def begin(self, optimizer: Any) -> None:
        """Prepares for the update of this rank's slices of the parameters, whose gradients are whole, or scattered."""
        parameters, items, self._items = trained(optimizer), self._items, None
        self._active = () if self._has_joined else self._communicator.not_joined
        if self._active:
            whole = None if items is not None else [parameter.grad for parameter in parameters]
            self._announce(optimizer, whole, self._active[0])
        if self.slices.is_whole and optimizer.state:
            self.slices.loads += 1
        if not self.slices.compared:
            self.slices.compared = True
            compare_parameters(parameters, Comparison(before=True), _ADVICE, self.slices.process_set)
            self.compare(optimizer, Comparison(before=True))
        if items is None:
            items = self._cut(parameters, [parameter.grad for parameter in parameters])
        self.slices.begin(optimizer, dict(zip(parameters, items, strict=True)))

    def end(self, optimizer: Any) -> None:
        """Gathers the parameters."""
        self.slices.end(optimizer)
        if self._active:  # ranks that have joined have gathered them, too, but have no batches
            self._communicator.not_joined = self._active

    def compare(self, optimizer: Any, comparison: Comparison) -> None:
        """Checks that ranks have identical settings, such as the learning rate, and have loaded as many states: each
        gives the others its own items, and parameters do not tell.
        """
        process_set, communicator = self.slices.process_set, self._communicator
        loads = communicator.agree(LOADED, value=self.slices.loads)
        check_loaded(loads, process_set.ranks)
        self.slices.loads = 0
        groups = enumerate(optimizer.param_groups)
        places = [(index, group, key) for index, group in groups for key, each in group.items() if _has_numbers(each)]
        names = [f"{key} of group {index}" for index, _, key in places]
        values = [np.array(on_host(group[key]), np.float64) for _, group, key in places]

        def assign(number: int, host: Any) -> None:
            _, group, key = places[number]
            group[key] = _with_numbers(group[key], host)

        check_identical(names, values, comparison, advice=_SETTINGS_ADVICE, process_set=process_set, assign=assign)

    def abandon(self) -> None:
        """Forgets the gradients of a step that is not made."""
        self._items, self._received = None, []

    def participate(self, optimizer: Any, parts: dict[Request, Callable[[Sequence[int]], None]]) -> None:
        """Adds to ``parts`` how this rank participates without batches: see ``joining.join``."""
        self._exchange.participate(parts, lambda _, reduced: setattr(self, "_received", reduced))
        parts[self._request] = partial(self._follow, optimizer)

    def _announce(self, optimizer: Any, gradients: Sequence[Any] | None, sender: int) -> None:
        """Tells ranks that have joined what they need for the update; the first that has not joined sends it."""
        communicator = self._communicator
        message = b""
        if communicator.launched[communicator.rank] == sender:
            message = encoded({"settings": settings_of(optimizer), "gradients": gradients})

        def collective() -> None:
            self._share(message, communicator.agree(self._request, value=len(message)))

        communicator.atomic(collective)

    def _share(self, message: bytes, lengths: Sequence[int]) -> bytes:
        shared = self._communicator.gather_bytes(np.frombuffer(message, np.uint8), list(lengths))
        return bytes(shared.tobytes())

    def _follow(self, optimizer: Any, lengths: Sequence[int]) -> None:
        """The part of a rank that has joined: it makes the step."""
        heard = decoded(self._share(b"", lengths))
        use_settings(optimizer, heard["settings"])
        if heard["gradients"] is None:
            self._items = self._exchange.items_of(self._received)
        else:
            self._items = self._cut(trained(optimizer), heard["gradients"])

        def step() -> None:
            active, self._has_joined = self._communicator.not_joined, True
            try:
                with optimizer.skip_synchronize():
                    optimizer.step()
            finally:
                self._communicator.not_joined, self._has_joined = active, False

        self._communicator.when_settled(step)

    def _cut(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        return [self.slices.own_items(*pair) for pair in zip(parameters, gradients, strict=True)]

    @property
    def _communicator(self) -> Any:
        return self.slices.process_set.communicator


def _has_numbers(setting: Any) -> bool:
    """Whether a setting, such as ``lr`` or ``betas``, consists of numbers, some of them tensors maybe."""
    if isinstance(setting, tuple):
        return all(_has_numbers(each) and not isinstance(each, tuple) for each in setting)
    if torch.is_tensor(setting):
        return bool(setting.numel() == 1)
    return isinstance(setting, numbers.Real) and not isinstance(setting, bool)


def _with_numbers(setting: Any, values: Any) -> Any:
    """Returns a setting with other numbers; tensors, which others may refer to, in their memory."""
    if isinstance(setting, tuple):
        return getattr(setting, "_make", tuple)(map(_with_numbers, setting, values))
    return setting.fill_(float(values)) if torch.is_tensor(setting) else type(setting)(values)


class GradientHook:
    """Reduces one optimizer's gradients before its steps, if not ``skipping``; ``number``: those created before it.
    ``sliced``: what else happens in a step if each rank has a slice of the optimizer's state.

    Hooks that a user registers later see the gradients of all ranks, and may clip them::

        before_step: reduce ──► the user's pre-hooks ──► before_update: cut this rank's slices ──► torch's step
    """

    shares_state = True
    #: Of the pre-hooks of the optimizer that call ``before_step`` and ``before_update``.
    handles: tuple[Any, ...] = ()

    def __init__(self, exchange: BackwardExchange | None, sliced: SlicedStep | None = None) -> None:
        self.exchange = exchange
        self._sliced = sliced
        self.process_set: Any = None if exchange is None else exchange.reducer.process_set
        self.skipping = False
        self.number = next(_created)
        self._reduced = self._dropped = self._is_due = False
        self._warned = False
        self._is_logged = False

    @property
    def pending(self) -> bool:
        """Whether a backward pass has computed gradients that are not reduced yet."""
        return self.exchange is not None and self.exchange.passes > 0

    @property
    def takes_steps(self) -> bool:
        """Whether the optimizer may make steps with the ranks that there are: not if its slices are those of others."""
        if self.process_set is None:
            return False
        launched = self.process_set.communicator.launched
        return self._sliced is None or bool(self._sliced.slices.holders.members == launched)

    def drop_gradients(self) -> None:
        """Forgets backward passes since the last step, whose gradients are made zeros."""
        if self.pending:
            self.abandon_step()
            self._dropped = True

    def _check_order(self) -> None:
        dropped, self._dropped = self._dropped and not self.pending, False
        if dropped:
            raise ConfigError(
                "zero_grad() was called between backward() and step(), so that no gradients are left: call it after "
                "step(), or before backward()."
            )

    def reduce(self, optimizer: Any) -> None:
        """Reduces whole gradients now."""
        if self.exchange is None:
            return
        self._check_order()
        parameters = trained(optimizer)
        reduced = self.exchange.reduce(parameters, [parameter.grad for parameter in parameters])
        for parameter, gradient in zip(parameters, reduced, strict=True):
            parameter.grad = gradient
        self._reduced = True

    def _reduce_for_step(self, optimizer: Any) -> None:
        """Reduces gradients that no one but the step needs, and the user's hooks."""
        if self._sliced is None or self._has_others(optimizer):
            self.reduce(optimizer)
        else:
            self._check_order()
            self._sliced.scatter(optimizer)

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Torch's pre-hook of ``step``, whose arguments it may replace: by a closure that also reduces gradients."""
        self._is_due = False
        if self._sliced is not None:
            self._sliced.slices.restore()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None and not (self.skipping and self._sliced is None):
            return (args[0], self._reducing(optimizer, closure)), {k: v for k, v in kwargs.items() if k != "closure"}
        if not self.skipping:
            if self.pending or not self._reduced:
                self._reduce_for_step(optimizer)
            elif not self._warned:
                self._warned = True
                warnings.warn(_NOT_AGAIN, stacklevel=_CALLER)
        self._is_due = True
        return None

    def before_update(self, optimizer: Any) -> None:
        """Torch's pre-hook of ``step`` after all others, unless a closure computes the gradients later."""
        if self._is_due:
            self._is_due = False
            self._begin_update(optimizer)

    def begin_after_all(self, optimizer: Any) -> None:
        """Keeps ``before_update`` the last of the optimizer's pre-hooks."""
        vars(optimizer)["_optimizer_step_pre_hooks"].move_to_end(self.handles[-1].id)

    def _has_others(self, optimizer: Any) -> bool:
        """Whether a step calls hooks of the user's between ``before_step`` and ``before_update``."""
        numbers = list(vars(optimizer)["_optimizer_step_pre_hooks"])
        first, last = (numbers.index(each.id) for each in self.handles)
        return bool(last - first > 1)

    def _begin_update(self, optimizer: Any) -> None:
        self._reduced = False
        if self._sliced is not None:
            self._sliced.begin(optimizer)

    def after_step(self, optimizer: Any) -> None:
        """Once, ranks compare their parameters."""
        if self._sliced is not None:
            self._sliced.end(optimizer)
        due = None if self.exchange is None else self.exchange.compare(_ADVICE)
        if due is not None and self._sliced is not None:
            self._sliced.compare(optimizer, due)
        if self.process_set is not None and not self._is_logged:
            self._is_logged = True
            weights = sum(each.numel() * each.element_size() for each in trained(optimizer))
            log_memory(type(optimizer).__name__, weights, partial(self._state_bytes, optimizer), self.process_set)

    def _state_bytes(self, optimizer: Any) -> tuple[int, int]:
        states = [each for each in optimizer.state.values() if isinstance(each, dict)]
        tensors = [each for state in states for each in state.values() if torch.is_tensor(each)]
        own = sum(each.numel() * each.element_size() for each in tensors)
        if self._sliced is None:
            return own, own
        slices = self._sliced.slices
        items = sum(stop - start for start, stop in (each.ranges[slices.number] for each in slices.divided.values()))
        return own, round(own / (items or 1) * sum(each.numel() for each in slices.divided))

    def abandon_step(self) -> None:
        """Forgets the gradients of a step that is not made."""
        self._reduced = False
        if self._sliced is not None:
            self._sliced.abandon()
        if self.exchange is not None:
            self.exchange.abandon()

    def participate(self, optimizer: Any, parts: dict[Request, Callable[[Sequence[int]], None]]) -> None:
        """Adds to ``parts`` how this rank participates without batches: see ``joining.join``."""
        if self._sliced is not None:
            self._sliced.participate(optimizer, parts)
        elif self.exchange is not None:
            self.exchange.participate(parts)

    def _reducing(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = itertools.count()

        def reducing() -> Any:
            if next(evaluations) and self._sliced is not None:
                raise ConfigError(
                    f"{type(optimizer).__name__}.step() evaluates its closure more than once, and with shard_state "
                    "this rank has updated its slices only by then: leave shard_state out."
                )
            loss = closure()
            if not self.skipping:
                self._reduce_for_step(optimizer)
            self._begin_update(optimizer)
            return loss

        return reducing


@final
class ChangeHook(GradientHook):
    """Adasum: each rank makes a step of its own, and ranks combine the changes of their parameters.

    ::

        parameters ──step with this rank's gradients──► change ──Adasum of all ranks'──► parameters + combined change
    """

    shares_state = False

    def __init__(self, compression: Compressor, process_set: ProcessSet) -> None:
        super().__init__(None)
        self.process_set = process_set
        self._compression = compression
        self._before: list[tuple[Any, Any]] = []

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps the parameters."""
        del args, kwargs
        self._before = [(parameter, parameter.detach().clone()) for parameter in trained(optimizer)]

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def after_step(self, optimizer: Any) -> None:
        """Combines what the step has changed."""
        del optimizer
        before, self._before = self._before, []
        changes = grouped_allreduce(
            [parameter.detach() - old for parameter, old in before],
            Reduction.ADASUM,
            name="parameter changes",
            compression=self._compression,
            process_set=self.process_set,
        )
        for (parameter, old), change in zip(before, changes, strict=True):
            parameter.copy_(old.add_(change))

    def abandon_step(self) -> None:
        """Forgets the parameters before a step that is not made."""
        self._before = []


def is_within_step(optimizer: Any) -> bool:
    """Whether torch calls hooks for the ``step`` that a user's ``step`` calls, ``super().step()``."""
    frame: FrameType | None = sys._getframe(2)
    found = 0
    while frame is not None and found < 2:
        found += frame.f_code is _STEP and frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return found == 2
