"""The step of an optimizer of which each rank has a slice of the state. Two ranks, of which rank 1 has no more batches
and has joined: it makes the updates of its slices with the others' gradients and settings, such as the learning rate::

    rank 0                                      rank 1
    gradients  ── reducescatter, with zeros ──  keeps its items
    settings   ───────────────────────────────► and, after synchronize(), the gradients as the user has clipped them
    update of its slices                        update of its slices
    parameters ────────── allgather ──────────  the same
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from choros.comm import Request
from choros.parallel.identical import Comparison, check_identical
from choros.parallel.reduce.gradients import Gradient
from choros.parallel.reduce.slices import LOADED, check_loaded
from choros.parallel.reduce.torch_backward import BackwardExchange, compare_parameters
from choros.torch.division import trained
from choros.torch.messages import decoded, encoded
from choros.torch.sliced_state import ParameterSlices, settings_of, use_settings

ADVICE = (
    "Start all ranks from the same values: call broadcast_parameters(model.state_dict(), root_rank=0) and "
    "broadcast_optimizer_state(optimizer, root_rank=0) before training, and in a function of hvd.elastic.run give the "
    "model, too, to TorchState."
)

_SETTINGS_ADVICE = (
    "Give all ranks identical settings: pass ReduceLROnPlateau the mean of their losses, hvd.allreduce(loss), and call "
    "broadcast_optimizer_state(optimizer, root_rank=0) if one rank alone resumes."
)


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
            compare_parameters(parameters, Comparison(before=True), ADVICE, self.slices.process_set)
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
        loads = communicator.atomic(lambda: communicator.agree(LOADED, value=self.slices.loads))
        check_loaded(loads, process_set.ranks)
        self.slices.loads = 0
        groups = enumerate(optimizer.param_groups)
        places = [
            (index, group, key) for index, group in groups for key, each in group.items() if isinstance(each, float)
        ]
        names = [f"{key} of group {index}" for index, _, key in places]
        values = [np.array(group[key]) for _, group, key in places]

        def assign(number: int, host: Any) -> None:
            _, group, key = places[number]
            group[key] = float(host)

        check_identical(names, values, comparison, advice=_SETTINGS_ADVICE, process_set=process_set, assign=assign)

    def abandon(self) -> None:
        """Forgets the gradients of a step that is not made."""
        self._items, self._received = None, []

    def participate(self, optimizer: Any, parts: dict[Request, Callable[[Sequence[int]], None]]) -> None:
        """Adds to ``parts`` how this rank participates without batches: see ``joining.join``."""
        self._exchange.participate(parts, partial(setattr, self, "_received"))
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
