"""Private groups of ``torch.distributed``: creation, options, waiting. The default group is never created: Keras from
3.16 on would then wrap a model in DistributedDataParallel, and average gradients a second time; and the user's
script can call ``init_process_group`` itself.
"""

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch  # noqa: TID253  (imported by the torch engine, and where torch's tensors are at hand)
import torch.distributed as dist  # noqa: TID253

from choros import durations
from choros.comm.reduction import Reduction
from choros.comm.store import translated
from choros.comm.waiting import LongWait, Reporter
from choros.transport.peers import connections_of_this_user

_OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}
#: An hour before a rank's next collective is no error. A rank that dies closes its connections.
FOREVER = timedelta(days=365)
#: The interval at which Python can handle Ctrl-C.
_NAP = timedelta(seconds=durations.NAP)


def gloo_group(store: dist.Store, rank: int, size: int, address: str, seconds: float, check: Callable[[], None]) -> Any:
    """Connects members by Gloo at ``address``, or ``GLOO_SOCKET_IFNAME``; ``check`` raises what ends the wait."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    ends = [{"interface": name} for name in names if name] or [{"hostname": address}]
    options = dist.ProcessGroupGloo._Options()
    # Gloo lets in whoever comes first. Between hosts, nothing says who that was.
    with translated("connecting the ranks"), connections_of_this_user():
        options._devices = [dist.ProcessGroupGloo.create_device(**end) for end in ends]
        options._timeout = timedelta(seconds=seconds)
        # In C++, which nothing interrupts: in another thread.
        connected: Future[Any] = Future()

        def connect() -> None:
            try:
                connected.set_result(dist.ProcessGroupGloo(store, rank, size, options))
            except BaseException as error:  # noqa: BLE001  (who waits raises it)
                connected.set_exception(error)

        threading.Thread(target=connect, name="choros: Gloo connects", daemon=True).start()
        while not wait([connected], _NAP.total_seconds()).done:
            check()
        group = connected.result()
    group._set_default_timeout(FOREVER)
    return group


def wait_on_host(
    work: Any,
    describe: Callable[[], LongWait] | None = None,
    check: Callable[[], None] = lambda: None,
    transfer: float = math.inf,
) -> None:
    """Waits for a collective of host tensors, which takes ``transfer`` seconds if all are there; ``check`` raises what
    ends it. The thread sleeps a tenth of a second at most, after which Python can handle Ctrl-C.
    """
    with Reporter(describe, transfer=transfer) as reporter:
        while not work.is_completed():
            with suppress(RuntimeError):
                work.wait(_NAP)
            reporter.check()
            check()
    work.wait()


def start_allgather(
    group: Any, send: torch.Tensor, received: torch.Tensor, counts: Sequence[int], rank: int
) -> list[Any]:
    """Starts to concatenate the ranks' rows, ``counts[i]`` of rank ``i``, in ``received``."""
    if len(set(counts)) == 1:
        return [group._allgather_base(received, send)]
    parts = torch.split(received, list(counts))
    parts[rank].copy_(send)
    return [group.broadcast([part], broadcast_options(root)) for root, part in enumerate(parts)]


def allreduce_options(op: Reduction) -> Any:
    """The options of an allreduce with ``op``."""
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    return options


def broadcast_options(root: int) -> Any:
    """The options of a broadcast from ``root``."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
