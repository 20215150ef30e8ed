"""Epochs of process sets."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import choros
from choros.comm import LEAVES, ProcessSet, Reduction, context, global_process_set, on_change
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.mpi_window import _identity, _map, _reserve
from choros.comm.primitives import Change
from choros.comm.reduction import writer
from choros.topology import Topology


def test_process_sets_are_no_part_of_what_is_copied() -> None:
    """As a model with layers that reduce over one."""
    some = ProcessSet([0, 2])
    assert copy.deepcopy({"set": some})["set"] is some
    assert pickle.loads(pickle.dumps(some)).ranks == [0, 2]
    assert pickle.loads(pickle.dumps(global_process_set)) is global_process_set


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16])
def test_an_average_over_more_ranks_than_the_dtype_counts(dtype: type) -> None:
    numbers = np.array([100, 3, 0], dtype)
    writer(Reduction.AVERAGE, 40_000)(numbers, numbers)
    assert numbers.tolist() == [0, 0, 0]


def test_memory_that_another_process_has_under_the_same_name_is_refused() -> None:
    """As in containers, whose processes have the same numbers."""
    (own, name), (other, _) = _reserve(4096), _reserve(4096)
    assert len(_map(name, _identity(own), 4096)) == 4096
    with pytest.raises(OSError, match="of another process"):
        _map(name, _identity(other), 4096)


def test_every_registration_is_an_epoch() -> None:
    process_set = ProcessSet([1, 0])
    assert process_set.epoch == 0
    for epoch in (1, 2, 3):
        process_set.register(1, [0, 1], None)
        assert (process_set.epoch, process_set.ranks) == (epoch, [0, 1])
        process_set.unregister()
        assert (process_set.epoch, process_set.ranks) == (epoch, [0, 1])


def test_a_signal_to_a_new_rank_while_it_is_taken_in_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    choros.init()
    assert context._job is not None
    new, member, from_hosts = (
        LocalCommunicator(0, ["a"], lambda: member),
        LocalCommunicator(0, ["a"]),
        Topology.from_hosts,
    )

    def signalled(*args: Any, **how: Any) -> Any:
        global_process_set.communicator.notice |= LEAVES  # as the signal's handler does
        return from_hosts(*args, **how)

    try:
        context._job.communicator = new
        global_process_set.register(0, [0], new)
        monkeypatch.setattr(context.Topology, "from_hosts", signalled)
        assert choros.comm.admit()
        assert (global_process_set.communicator, member.notice) == (member, LEAVES)
    finally:
        choros.shutdown()


def test_a_listener_ends_with_its_object() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.end = on_change(self.changed)

        def changed(self, change: Change) -> None:
            pass

    before = [*context._change_listeners]
    sampler = Sampler()
    assert len(context._change_listeners) == len(before) + 1
    del sampler
    assert context._change_listeners == before
    on_change(lambda _: None)()
    assert context._change_listeners == before
