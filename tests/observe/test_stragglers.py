"""Stragglers: ranks for which the others wait, step after step."""

import itertools
import mmap
import os
import sys
import time

import pytest

from choros.launch.plan.roles import NO_ROLES
from choros.observe.progress import PAGE_BYTES, PROGRESS_FD, Page, RankProgress, open_page, page, read_page
from choros.observe.verdict import Stragglers
from launch.launched import rank_script, run


def slow(rank, steps=100, loading=0.0):
    return RankProgress(rank, steps, steps, steps * 0.6, steps * 0.006, loading)


def waits(rank, steps=100, share=0.4):
    return RankProgress(rank, steps, 0, steps * 0.6, steps * 0.6 * share)


def sentences(size, *notes):
    stragglers = Stragglers(size, NO_ROLES.names)
    return [stragglers.note(each) for each in notes], stragglers


def test_the_rank_that_the_others_wait_for_is_named_once():
    (first, second), stragglers = sentences(2, waits(0), slow(1, loading=45.0))
    assert first == ""
    assert second == (
        "rank 1 is slower than the others, which waited 40 % of the time for it in 100 steps (60 s). It computed 24 %, "
        "loaded data 75 % and waited 1 %"
    )
    assert [stragglers.note(each) for each in (waits(0, 200), slow(1, 200, 90.0))] == ["", ""]
    assert stragglers.of_job() == ""
    even = RankProgress(0, 300, 100, 180.0, 50.0), RankProgress(1, 300, 300, 180.0, 1.8)
    assert [stragglers.note(each) for each in even] == ["", ""]  # rank 0 was prompt in this period, too


def test_several_slow_ranks_are_named_together():
    last = sentences(4, waits(0), waits(1, share=0.3), slow(2), slow(3))[0][-1]
    assert last.startswith("ranks 2, 3 are slower than the others, which waited 30 % of the time for them in 100 steps")
    assert last.endswith("Rank 2 computed 99 % and waited 1 %")


@pytest.mark.parametrize(
    "ranks",
    [
        (waits(0), waits(1)),  # they take turns
        (waits(0, share=0.08), slow(1)),  # too little to matter
        (waits(0, steps=19), slow(1, steps=19)),  # too few steps
        (waits(0), slow(1), slow(2)),  # most are slow: one is fast
        (RankProgress(0, 100, 90, 60.0, 20.0), slow(1)),  # one long wait, as for a checkpoint
        (RankProgress(0), slow(1)),  # a rank that does not train
    ],
    ids=["turns", "short", "few steps", "majority", "checkpoint", "no steps"],
)
def test_ranks_that_are_no_stragglers(ranks):
    found, stragglers = sentences(len(ranks), *ranks)
    assert not any(found)
    assert stragglers.of_job() == ""


def test_of_a_job_that_is_shorter_than_a_period():
    stragglers = Stragglers(2, NO_ROLES.names)
    stragglers.note(waits(0))
    assert stragglers.of_job() == ""
    stragglers._now[1] = slow(1)
    assert stragglers.of_job().startswith("rank 1 is slower")


def test_what_a_page_has(monkeypatch):
    written, clock = Page(bytearray(PAGE_BYTES)), itertools.count(1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert read_page(written.memory).last == ""
    written.begin_collective(b"x" * PAGE_BYTES, 2)
    written.end_collective("gradients", 0)
    assert not read_page(written.memory).moves
    written.begin_collective("allreduce(name='π')".encode(), 3)
    for wait in (0.0, 1e9):
        written.note_step()
        with written.loading(), written.loading():
            pass
        written.waited += wait
    written.note_step()
    done = read_page(written.memory)
    assert (done.steps, done.prompt_steps) == (2, 1)
    assert (done.last, done.last_size, done.moves) == ("allreduce(name='π')", 3, True)
    assert 0 < done.waiting <= done.seconds
    assert 0 < done.loading <= done.seconds


def test_a_step_that_is_compiled_is_a_pause(monkeypatch):
    written, clock = Page(bytearray(PAGE_BYTES)), iter((1.0, 3.0, 8.0, 9.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for compiles in (False, False, True, False):
        if compiles:
            written.note_compiling()
        written.note_step(8)
    done = read_page(written.memory)
    assert (done.steps, done.examples) == (2, 16)
    assert (done.seconds, done.pausing) == (3.0, 5.0)


def test_a_page_has_a_row_for_each_of_the_first_collectives():
    written = Page(bytearray(PAGE_BYTES))
    written.begin_collective(b"x" * PAGE_BYTES, 2)
    written.note_step()
    for _ in range(2):
        written.end_collective("gradients", 10**9)
        for number in range(9):
            written.end_collective(f"a-long-name-of-{number}", number)
    found = read_page(written.memory).collectives
    assert list(found) == ["gradients", *(f"a-long-name-of-{number}" for number in range(6)), "others"]
    assert found["gradients"] == (2, 2 * 10**9)
    assert found["others"] == (6, 2 * (6 + 7 + 8))


def test_the_page_of_a_wrapper(monkeypatch, tmp_path):
    with (tmp_path / "page").open("w+b") as file:
        file.truncate(PAGE_BYTES)
        monkeypatch.setenv(PROGRESS_FD, str(os.dup(file.fileno())))
        memory = page.memory
        try:
            open_page()
            assert isinstance(page.memory, mmap.mmap)
            assert PROGRESS_FD not in os.environ
            page.begin_collective(b"barrier()", 2)
        finally:
            page.memory = memory
        assert read_page(file.read()).last == "barrier()"


TRAINING = """
import keras, numpy
import choros.keras as hvd
hvd.init()

class Batches(keras.utils.PyDataset):
    begun = False
    def __len__(self):
        return 22
    def __getitem__(self, index):
        if rank == 1:  # its first batch takes longer than all that a framework does at first
            time.sleep(0.4 if self.begun else 3.0)
            self.begun = True
        return numpy.ones((4, 2), "float32"), numpy.ones((4, 1), "float32")

model = keras.Sequential([keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(Batches(), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""


@pytest.mark.slow
def test_a_rank_that_loads_slowly_is_named_at_the_end(tmp_path):
    """Though the machine is so busy that it, too, waits for some milliseconds. A job of 10 s has a verdict instead."""
    script = rank_script(tmp_path / "script.py", TRAINING)
    env = ("--env", "KERAS_BACKEND=torch", "--env", "CHOROS_VERDICT=0")
    ended = run("-np", 2, *env, sys.executable, script)
    assert ended.code == 0, ended.err
    said = next((line for line in ended.err.splitlines() if "slower" in line), ended.err)
    assert said.startswith("chorosrun: rank 1 is slower than the others, which waited ")
    assert "loaded data " in said
