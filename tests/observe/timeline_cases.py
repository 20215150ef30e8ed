"""Timelines of real ranks: on three, by ``start_timeline`` and ``stop_timeline``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

import choros
from choros.comm import Reduction
from choros.comm.recording import start_timeline, stop_timeline
from choros.errors import ConfigError, MismatchError
from choros.observe.timeline import parts_directory
from choros.parallel.objects import broadcast_object
from choros.trace.cli import rank_times, summary_text, waits_of
from choros.trace.trace import collectives_of
from comm import matching_cases
from observe.timelines import MS, read

DELAY, TIMES = 0.3, 5


def communicator():
    return choros.global_process_set.communicator


def common(path: Path) -> Path:
    """Rank 0's path."""
    return broadcast_object(path, 0)


def case_the_others_waited_for_the_rank_that_was_late(tmp_path: Path) -> None:
    file = common(tmp_path) / "run.json"
    start_timeline(file)
    for _ in range(TIMES):
        if choros.rank() == 1:
            time.sleep(DELAY)
        communicator().allreduce(np.ones(4, np.float32), Reduction.SUM, name="loss")
    stop_timeline()
    trace = read(file)
    assert [each.rank for each in rank_times(trace)] == [0, 1, 2]
    first = waits_of(trace)[0]
    assert (first.rank, first.collective) == (1, "loss")
    assert first.collectives >= TIMES
    assert first.median >= 40 * MS
    assert first.total >= 2 * TIMES * 40 * MS
    text = summary_text(trace)
    assert "of it for rank 1." in text
    communicator().barrier()  # every rank removes its part
    assert not parts_directory(file).exists()


def case_names_bytes_and_sets_are_those_of_the_calls(tmp_path: Path) -> None:
    file = common(tmp_path) / "run.json"
    pair = choros.add_process_set([0, 2])
    start_timeline(str(file), mark_cycles=True)
    communicator().allgather(np.ones(2, np.float32), name="rows")
    if pair.included():
        pair.communicator.barrier(name="pair")
    with pytest.raises(MismatchError):
        communicator().allreduce(1, name=f"of {choros.rank()}")
    communicator().broadcast(np.ones(3), 1, name="last")
    stop_timeline()
    choros.remove_process_set(pair)
    trace = read(file)
    found = {collective.calls[0].name: collective for collective in collectives_of(trace.calls)}
    assert {name: sorted(call.rank for call in found[name].calls) for name in ("rows", "pair", "last")} == {
        "rows": [0, 1, 2], "pair": [0, 2], "last": [0, 1, 2],
    }  # fmt: skip
    assert [call.bytes for call in sorted(found["last"].calls, key=lambda call: call.rank)] == [0, 24, 0]
    # What ranks ask for under different names begins on none of them.
    assert len({each.began for each in trace.intervals if each.name == "CYCLE_START" and each.rank == 0}) == 4
    communicator().barrier()  # no rank removes the file while another reads it


def case_collectives_that_ranks_ask_for_in_different_orders(tmp_path: Path) -> None:
    """From three threads of each rank, with errors in between: the calls of a collective have one name on all ranks."""
    file = common(tmp_path) / "run.json"
    start_timeline(file)
    matching_cases.case_hundreds_from_three_threads_in_random_orders_with_errors(communicator())
    stop_timeline()
    found = collectives_of(read(file).calls)
    named = [{call.name for call in collective.calls} for collective in found if len(collective.calls) == 3]
    assert all(len(names) == 1 for names in named)
    assert {name for names in named for name in names} >= set(matching_cases.NAMES)
    for collective in found:
        if collective.calls[0].matched is not None:
            assert max(call.began for call in collective.calls) <= min(call.matched for call in collective.calls)
    communicator().barrier()


def case_each_rank_may_give_a_path_of_its_own(tmp_path: Path) -> None:
    """As in Horovod, where rank 0's counts."""
    file = tmp_path / f"run-{choros.rank()}.json"
    start_timeline(file)
    stop_timeline()
    assert file.exists() == (choros.rank() == 0)
    assert not parts_directory(file).exists()
    if choros.rank() == 0:
        assert len(read(file).ranks) == 3


def case_a_second_timeline_ends_the_first(tmp_path: Path) -> None:
    files = [common(tmp_path) / name for name in ("first.json", "second.json")]
    for number, file in enumerate(files):
        start_timeline(file)
        communicator().barrier(name=f"barrier {number}")
    stop_timeline()
    stop_timeline()  # there is none
    for number, file in enumerate(files):
        assert {call.name for call in read(file).calls} >= {f"barrier {number}"}
        assert f"barrier {1 - number}" not in {call.name for call in read(file).calls}
    communicator().barrier()


def case_a_rank_that_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError if choros.rank() == 1 else MismatchError, match="is a directory"):
        start_timeline(tmp_path if choros.rank() == 1 else tmp_path / "run.json")
    assert os.listdir(tmp_path) == []
    communicator().barrier()


def case_a_timeline_of_one_rank_alone_is_an_error_on_all(tmp_path: Path) -> None:
    if choros.rank() == 0:
        with pytest.raises(MismatchError, match="rank 0: start_timeline"):
            start_timeline(tmp_path / "run.json")
    else:
        with pytest.raises(MismatchError, match="rank 0: start_timeline"):
            communicator().barrier()
    assert os.listdir(tmp_path) == []
    communicator().barrier()
