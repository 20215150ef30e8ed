"""The torch engine on ranks that MPI started."""

from __future__ import annotations

import os

import numpy as np

import choros
from choros.comm import global_process_set, topology
from choros.comm.engines.torch import TorchCommunicator


def case_ranks_started_by_mpi_can_use_the_torch_engine() -> None:
    assert not isinstance(global_process_set.communicator, TorchCommunicator)
    position = topology()
    choros.shutdown()
    os.environ["CHOROS_ENGINE"] = "torch"
    for _ in range(2):
        choros.init()
        assert topology() == position
        communicator = global_process_set.communicator
        assert isinstance(communicator, TorchCommunicator)
        np.testing.assert_array_equal(communicator.allgather([choros.rank()]), range(choros.size()))
        choros.shutdown()
    del os.environ["CHOROS_ENGINE"]
    choros.init()
    assert not isinstance(global_process_set.communicator, TorchCommunicator)
