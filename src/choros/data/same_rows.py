"""The check that all processes of a strategy have the same rows in the same order: otherwise their parts repeat some
rows and miss others, and nothing else shows it::

    process 0    rows 0 1 2 3 4 5    its part: 0 1 2         a sample of each kind's ``traits``, gathered once
    process 1    rows 4 0 5 1 3 2    its part: 1 3 2         differs: ConfigError on both
"""

import logging
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from choros.arrays import adapter_of, framework_adapter
from choros.comm import global_process_set
from choros.data.kinds import kind_of
from choros.errors import ConfigError

_log = logging.getLogger("choros")
#: How many rows of an array are compared, evenly spread.
_ROWS = 32
#: Differences below this part of the values are rounding: hosts may have different processors.
_ROUNDING = 1e-4
_ADVICE = (
    "Each process takes its part of the same rows, so some would be used twice and others never. Draw the same random "
    "numbers on all processes: call keras.utils.set_random_seed(…) first, pass random_state=… or seed=… to what splits "
    "and shuffles, or create the strategy before the data, which gives all processes the same numbers of random and "
    "numpy.random."
)


def check_same_rows(data: Any) -> None:
    """Raises a ``ConfigError`` on every process if some have other rows in ``data``, as far as a sample shows; warns
    where rows may differ because each process augments them. All processes call it, but new ones of elastic jobs.
    """
    communicator = global_process_set.communicator
    if communicator.size == 1 or communicator.is_new:
        return
    kind = kind_of(data)
    samples = [_sample(each) for each in kind.traits(data)]
    own = np.concatenate([np.zeros((3, 0)), *samples], axis=1)
    shapes = communicator.allgather(np.array([own.shape[1]]), name="length of a sample of the data")
    differing: list[int] = np.flatnonzero(shapes != shapes[0]).tolist()
    if not differing and own.size:
        gathered = communicator.allgather(own[None], name="a sample of the data")
        counts, values, sizes = gathered.swapaxes(0, 1)
        differs = (counts != counts[0]) | (np.abs(values - values[0]) > _ROUNDING * (sizes + sizes[0]))
        differing = np.flatnonzero(differs.any(axis=1)).tolist()
    if differing:
        rank = communicator.ranks[differing[0]]
        found = f"the processes have different data: rank {rank} has not the same rows as rank {communicator.ranks[0]}"
        if not kind.augments:
            raise ConfigError(f"{found}. {_ADVICE} For rows of each process's own, use {kind.own_rows}.")
        if communicator.rank == 0:
            _log.warning("%s in the first batch's labels. %s", found, _ADVICE)


def _sample(array: Any) -> NDArray[np.float64]:
    """For each of some rows: how many the array has, a weighted sum of the row, and how large its terms are.

    >>> _sample(np.arange(3.0)).shape
    (3, 32)
    """
    adapter, places = adapter_of(array), np.linspace(0, len(array) - 1, _ROWS).astype(int)
    if not len(array):
        rows = np.zeros((_ROWS, 1))
    elif adapter is framework_adapter("numpy"):
        rows = np.asarray(array)[places]
    else:  # maybe on a device, from which no more than these rows are copied
        rows = np.stack([adapter.to_host(array[place]) for place in places.tolist()])
    if rows.dtype.kind in "OSUc":
        names = [repr(row).rpartition("/")[2] for row in rows.tolist()]  # the same files may lie in other directories
        numbers = np.array([[zlib.crc32(name.encode())] for name in names], np.float64)
    else:
        numbers = np.nan_to_num(rows.reshape(_ROWS, -1).astype(np.float64), posinf=1e9, neginf=-1e9)
    weights = np.random.default_rng(0).random(numbers.shape[1])
    return np.stack([np.full(_ROWS, len(array), np.float64), numbers @ weights, np.abs(numbers) @ weights])
