"""What a rank knows of the machine that it runs on, and how it runs the call that the driver has packed."""

import os
import sys
from typing import Any

from choros.launch.bootstrap import unpack
from choros.spark.plan import Machine
from choros.transport.address import this_host

VISIBLE = "CUDA_VISIBLE_DEVICES"
#: The machine of this rank; ``None`` in processes that Spark has not placed.
_own: Machine | None = None


def run_packed(packed: bytes, machines: tuple[Machine, ...]) -> Any:
    """Runs the call that the driver has packed on this rank, which gets the accelerators of its machine's tasks.
    Modules are looked for where Spark's Python looks for them, then where the driver does.
    """
    global _own
    host = this_host()
    _own = next((machine for machine in machines if machine.host == host), None)
    if _own is not None and _own.visible:
        os.environ[VISIBLE] = ",".join(_own.visible)
    return unpack(packed, before=list(sys.path))()


def scratch_directory() -> str | None:
    """Returns the directory for temporary files that the ranks of this machine share, which the job removes at its end;
    ``None`` in processes that Spark has not placed.
    """
    return None if _own is None else _own.directory


def get_available_devices() -> list[str]:
    """Returns the accelerators that Spark has given to this rank's task, as the numbers that a framework knows them by,
    which sees only those of the job on this machine. Call it after ``init()``.
    """
    from choros.comm.context import local_rank

    if _own is None or not _own.visible:
        return []
    return [str(_own.visible.index(each)) for each in _own.devices[local_rank() % len(_own.devices)]]
