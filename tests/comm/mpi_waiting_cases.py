"""How calls of MPI that block wait."""

from __future__ import annotations

import pytest

from choros.comm.waiting import idle_yield, open_mpi_switch


def case_blocking_calls_yield_while_others_use_the_core() -> None:
    idle = idle_yield()
    if idle._switch is None:
        pytest.skip("another MPI, or more ranks than cores, which always yield")
    idle.note(core_is_shared=True)
    assert open_mpi_switch() is None, "they do not yield"
    for _ in range(100):
        idle.note(core_is_shared=False)
    assert open_mpi_switch() is not None, "they still yield"
