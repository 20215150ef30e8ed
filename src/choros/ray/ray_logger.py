"""``log``: what a rank gives the callbacks of the ``run`` that it works for."""

import os
import warnings
from typing import Any

from choros import durations
from choros.ray.messages import REGISTRY, Logged
from choros.transport.channel import connect
from choros.transport.secret import job_key

_address = ""


def configure(address: str) -> None:
    """Says where the executor of this rank listens."""
    global _address
    _address = address


def log(info_dict: Any) -> None:
    """Gives ``info_dict`` to the ``callbacks`` of ``RayExecutor.run``, and returns when they have returned."""
    if not _address:
        warnings.warn("`ray_logger.log` called but logging is not configured.", stacklevel=2)
        return
    executor = connect(_address, job_key(os.environ, [_address]), "rank", REGISTRY, durations.RAY_CONNECT)
    executor.send(Logged(info_dict))
    executor.receive()
    executor.close()
