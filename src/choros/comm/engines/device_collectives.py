"""Collectives on devices, over a connection of each of them that is made at its first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from choros.comm.communicator import Communicator
from choros.comm.devices import Device, DeviceCollectives, DeviceLink, device_of
from choros.comm.reduction import Reduction
from choros.comm.request import Request
from choros.errors import ChorosError, EngineUnavailable

if TYPE_CHECKING:
    from choros.comm.engines.device_group import DeviceGroup
    from choros.comm.selection import DeviceChoice

__all__ = ["LinkedDevices", "agree_to_connect", "chosen"]


def chosen(control: Communicator, choice: DeviceChoice) -> LinkedDevices:
    """Returns the collectives of the members of ``control`` that were selected."""

    def connect(control: Communicator, device: Device) -> DeviceLink:
        # Imported by the first connection: without one, no rank waits for PyTorch's import.
        link: DeviceLink = importlib.import_module(f"choros.comm.engines.{choice.module}").connect(control, device)
        return link

    return LinkedDevices(control, choice, connect)


def agree_to_connect(control: Communicator, device: Device, library: str, problem: ChorosError | None) -> None:
    """Raises an error on all members if one of them cannot connect ``device``, or would by another library."""
    with control.exclusive():
        control.agree(Request("connection of devices", f"{device.type} through {library}"), problem=problem)


@final
class LinkedDevices(DeviceCollectives):
    """Collectives on the devices of a communicator's members; checks need PyTorch, whose tensors results are."""

    def __init__(
        self, control: Communicator, choice: DeviceChoice, connect: Callable[[Communicator, Device], DeviceLink]
    ) -> None:
        """Connects nothing yet.

        Args:
            control: the members.
            choice: what was selected.
            connect: connects a device; all members call it together.
        """
        super().__init__(choice.kinds)
        self._control = control
        self._connect = connect
        self._links: dict[Device, DeviceLink] = {}

    def reduce_in_place(self, buffer: Any, op: Reduction) -> None:
        """See ``DeviceCollectives``."""
        self._link(device_of(buffer)).allreduce(buffer, op)

    def allreduce(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        self._group(tensor).allreduce(tensor, op, name=name)

    def broadcast(self, tensor: Any, root: int = 0, *, name: str = "") -> None:
        """See ``DeviceCollectives``."""
        self._group(tensor).broadcast(tensor, root, name=name)

    def allgather(self, tensor: Any, *, name: str = "") -> Any:
        """See ``DeviceCollectives``."""
        return self._group(tensor).allgather(tensor, name=name)

    def reducescatter(self, tensor: Any, op: Reduction = Reduction.AVERAGE, *, name: str = "") -> Any:
        """See ``DeviceCollectives``."""
        return self._group(tensor).reducescatter(tensor, op, name=name)

    def alltoall(self, tensor: Any, splits: Sequence[int] | None = None, *, name: str = "") -> tuple[Any, list[int]]:
        """See ``DeviceCollectives``."""
        return self._group(tensor).alltoall(tensor, splits, name=name)

    def close(self) -> None:
        """See ``DeviceCollectives``."""
        while self._links:
            self._links.popitem()[1].close()

    def _link(self, device: Device) -> DeviceLink:
        if device not in self._links:
            self._links[device] = self._connect(self._control, device)
        return self._links[device]

    def _group(self, tensor: Any) -> DeviceGroup:
        try:
            from choros.comm.engines.device_group import DeviceGroup, as_tensor
        except ImportError as error:
            raise EngineUnavailable(
                "collectives on device tensors need PyTorch, whose tensors their results are: pip install torch, or "
                "call the communicator's own, which pass host memory."
            ) from error
        device = device_of(as_tensor(tensor))
        return DeviceGroup(self._control, self._link(device), device)
