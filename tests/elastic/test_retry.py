"""``elastic.run`` and states, with an elastic job that the test controls."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

import choros
from choros.arrays.adapter import recognize_errors, remember
from choros.elastic import job
from choros.elastic.job import HostUpdate
from choros.elastic.retry import run, run_fn
from choros.elastic.sampler import ElasticSampler
from choros.elastic.state import ObjectState
from choros.errors import EngineError, HostsUpdatedInterrupt, MismatchError, PeerLostError


class Changing:
    """Records what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.update = HostUpdate.NONE
        self.listeners: list[Callable[[Mapping[int, int]], None]] = []
        self.written: list[Any] = []

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        self.calls.append("raising")
        yield
        self.calls.append("ended")

    def pending(self) -> HostUpdate:
        return self.update

    def admit(self) -> bool:
        self.calls.append("admit")
        self.update = HostUpdate.NONE
        return True

    def on_change(self, listener: Callable[[Any], None]) -> None:
        self.listeners.append(lambda new_ranks: listener(SimpleNamespace(new_ranks=new_ranks)))

    def commits(self) -> Any:
        return self

    def write(self, state: Any) -> int:
        self.written.append(state)
        return len(self.written)

    def load_last(self, *, own: bool = False) -> Any:
        return self.written[-1] if self.written else None


@pytest.fixture
def changing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Changing]:
    choros.init()
    changing = Changing()
    monkeypatch.setattr(job, "survives", lambda: True)
    for name in ("raising", "pending", "admit", "commits"):
        monkeypatch.setattr(job, name, getattr(changing, name))
    monkeypatch.setattr("choros.elastic.sampler.on_change", changing.on_change)
    yield changing
    choros.shutdown()


def test_ranks_that_are_lost_one_after_another_are_no_failures(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But losses count of which others have taken the places: they might come again and again."""
    left = [5, 4, 3, 2]

    def lose(_: Any) -> str:
        if len(left) > 1:
            del left[0]
            raise PeerLostError("a rank was lost.")
        return "the result"

    monkeypatch.setattr(job, "members", lambda: left[0])
    assert run(lose)(ObjectState()) == "the result"
    left[:] = [5, 4, 5, 4, 5, 4, 5, 4]
    with pytest.raises(PeerLostError):
        run(lose)(ObjectState())


class Traced(ObjectState):
    """Says what happens to it."""

    def __init__(self, calls: list[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = calls
        self.register_reset_callbacks([lambda: calls.append("callback")])

    def sync(self) -> None:
        self.calls.append("sync")
        super().sync()

    def restore(self) -> None:
        if hasattr(self, "calls"):
            self.calls.append("restore")
        super().restore()


def test_a_lost_rank_restores_the_last_commit(changing: Changing) -> None:
    seen = []

    @run
    def train(state: Any, end: int, *, error: Exception) -> str:
        seen.append(state.step)
        while state.step < end:
            state.step += 1
            if state.step == 2:
                state.commit()
            if state.step == 3 and len(seen) == 1:
                raise error
        return "done"

    state = Traced(changing.calls, step=0)
    assert train(state, 5, error=PeerLostError("rank 1 was lost", ranks=[1])) == "done"
    assert seen == [0, 2]
    assert changing.calls == ["raising", "admit", "sync", "restore", "admit", "callback", "sync", "ended"]


def test_a_rank_that_is_taken_in_before_the_first_call_is_a_reset(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new rank calls the callbacks, which may communicate."""
    present = [2]
    monkeypatch.setattr(job, "members", lambda: present[0])
    monkeypatch.setattr(job, "admit", lambda: present.insert(0, 3) or changing.admit())
    assert run(lambda state: "done")(Traced(changing.calls)) == "done"
    assert changing.calls == ["raising", "admit", "callback", "sync", "ended"]


class FrameworkError(Exception):
    """What a framework raises in the place of an exception on the host."""


def test_what_is_logged_is_the_sentence_of_the_host(changing: Changing, caplog: pytest.LogCaptureFixture) -> None:
    recognize_errors(FrameworkError, lambda own: type(own.__name__, (own, FrameworkError), {}))

    @run
    def train(state: Any) -> None:
        if state.step == 0:
            state.step = 1
            state.commit()
            remember(PeerLostError("rank 1 was lost", ranks=[1]))
            raise FrameworkError("Graph execution error:\nDetected at\nrank 1 was lost\nin a node")

    with caplog.at_level("WARNING", "choros"):
        train(Traced(changing.calls, step=0))
    assert caplog.messages == ["training goes on from the last commit: rank 1 was lost"]


def test_a_function_in_another_takes_in_no_rank(changing: Changing) -> None:
    """It would be one that waits in the other."""
    inner = run(lambda state: state.commit())
    run(lambda _: inner(ObjectState()))(ObjectState())
    assert changing.calls.count("admit") == 1


def test_changed_hosts_keep_the_state(changing: Changing) -> None:
    seen = []

    @run
    def train(state: Any) -> None:
        seen.append(state.step)
        while state.step < 4:
            state.step += 1
            if state.step == 2 and len(seen) == 1:
                changing.update = HostUpdate.ADDED
            state.check_host_updates()

    train(Traced(changing.calls, step=0))
    assert seen == [0, 2]
    assert changing.calls == ["raising", "admit", "sync", "admit", "callback", "sync", "ended"]


def test_hosts_that_were_only_removed_need_no_sync(changing: Changing) -> None:
    @run
    def train(state: Any) -> None:
        if state.step == 0:
            state.step = 1
            state.on_hosts_updated(0.0, HostUpdate.REMOVED)
            state.commit()

    train(Traced(changing.calls, step=0))
    assert changing.calls.count("sync") == 1
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        raise HostsUpdatedInterrupt(skip_sync=True)
    assert caught.value.skip_sync


def test_a_rank_that_is_taken_in_when_hosts_were_removed_gets_the_state(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = [2]
    monkeypatch.setattr(job, "members", lambda: present[0])

    @run
    def train(state: Any) -> None:
        if state.step == 0:
            state.step = 1
            monkeypatch.setattr(job, "admit", lambda: present.insert(0, 3) or changing.admit())
            state.on_hosts_updated(0.0, HostUpdate.REMOVED)
            state.commit()

    train(Traced(changing.calls, step=0))
    assert changing.calls.count("sync") == 2


def test_a_function_that_fails_again_and_again_fails(changing: Changing) -> None:
    calls = []

    @run
    def train(state: Any) -> None:
        calls.append(state.step)
        raise EngineError("no network")

    with pytest.raises(EngineError, match="no network"):
        train(ObjectState(step=0))
    assert len(calls) == 3


def test_commits_in_between_allow_more_failures(changing: Changing) -> None:
    @run
    def train(state: Any) -> None:
        state.step += 1
        state.commit()
        if state.step < 7:
            raise EngineError("no network")

    state = ObjectState(step=0)
    train(state)
    assert state.step == 7


def test_errors_of_the_program_are_not_repeated(changing: Changing) -> None:
    calls = []

    @run
    def train(state: Any, error: Exception) -> None:
        calls.append(1)
        raise error

    for error in (MismatchError("different"), ValueError("wrong")):
        with pytest.raises(type(error)):
            train(ObjectState(), error)
    assert len(calls) == 2


def test_a_job_that_cannot_go_on_without_a_rank_ends() -> None:
    choros.init()
    try:

        @run
        def train(state: Any) -> None:
            raise PeerLostError("rank 1 was lost", ranks=[1])

        with pytest.raises(PeerLostError):
            train(ObjectState())
    finally:
        choros.shutdown()


def test_run_fn_calls_reset_before_the_callbacks(changing: Changing) -> None:
    failed: list[int] = []

    def train(state: Any) -> None:
        if not failed:
            failed.append(1)
            raise EngineError("lost")

    run_fn(train, lambda: changing.calls.append("reset"))(Traced(changing.calls))
    assert changing.calls[-4:] == ["reset", "callback", "sync", "ended"]


def test_a_started_job_goes_on_from_the_commit_on_disk(changing: Changing) -> None:
    run(lambda state: state.commit())(ObjectState(epoch=3, history=[1, 2]))
    new = ObjectState(epoch=0, history=[])
    run(lambda _: None)(new)
    assert (new.epoch, new.history) == (3, [1, 2])


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Commits on disk; the function that is returned begins the script anew."""
    monkeypatch.setenv("CHOROS_COMMIT_DIR", str(tmp_path))

    def begin() -> None:
        monkeypatch.setattr(job, "_calls", itertools.count(1))

    choros.init()
    begin()
    yield begin
    choros.shutdown()


def test_functions_have_commits_of_their_own(commits: Callable[[], None]) -> None:
    @run
    def train(state: Any, steps: int) -> int:
        while state.step < steps:
            state.step += 1
            state.sum += 1
            state.commit()
        return int(state.sum)

    for _ in range(2):
        assert [train(ObjectState(step=0, sum=0), steps) for steps in (5, 3, 7)] == [5, 3, 7]
        commits()


def test_a_function_in_another_has_commits_in_memory(commits: Callable[[], None]) -> None:
    @run
    def inner(state: Any) -> None:
        state.step += 1
        state.commit()

    @run
    def outer(state: Any, folds: int) -> None:
        while state.folds < folds:
            inner(ObjectState(step=0))
            state.folds += 1
            state.commit()

    for folds in (2, 3):
        state = ObjectState(folds=0)
        outer(state, folds)
        assert state.folds == folds
        commits()


def test_objects_that_change_in_place_are_restored() -> None:
    state = ObjectState(history=[1])
    state.save()
    state.history.append(2)
    state.restore()
    assert state.history == [1]
    state.history.append(3)
    state.restore()
    assert state.history == [1]


def test_a_sampler_gives_each_example_once(changing: Changing) -> None:
    """Three ranks, one after the other in this process; the last is lost after two batches."""
    everyone = [ElasticSampler(range(20), seed=4) for _ in range(3)]
    orders = []
    for rank, sampler in enumerate(everyone):
        sampler._ledger = sampler._ledger.resharded(3, sampler._length)
        sampler._joins = True  # as after has_left(), in which all ranks meet
        orders.append(_as_rank(rank, sampler))
        for batch in range(2):
            sampler.record_batch(batch, 2)
    assert sorted(index for order in orders for index in order) == list(range(20))
    for listener in changing.listeners[:2]:
        listener({0: 0, 1: 1})
    seen = [index for order in orders[:2] for index in order] + orders[2][:4]
    for sampler in everyone[:2]:
        for batch in (2, 3):
            sampler.record_batch(batch, 2)
    survivor = everyone[0]
    assert survivor.has_left()
    assert sorted(seen + list(survivor)) == list(range(20))
    survivor.record_batch(0, len(survivor))
    assert not survivor.has_left()


def test_an_example_more_in_the_only_batch_of_a_lost_rank_is_not_repeated(changing: Changing) -> None:
    """A rank records the length of its batch, as Horovod's examples do; those of an epoch before had four."""
    survivor = ElasticSampler(range(7))
    survivor.record_batch(0, 4)
    survivor.set_epoch(1)
    survivor._ledger = survivor._ledger.of_epoch(1, 3)  # of three, two and two
    with patch("choros.elastic.sampler.rank", lambda: 1):
        survivor.record_batch(0, 2)
    changing.listeners[0]({1: 0, 2: 1})
    assert not survivor.has_left()


def test_what_a_rank_leaves_over_before_the_first_batch_is_not_lost(changing: Changing) -> None:
    sampler = ElasticSampler(range(1))
    sampler._ledger = sampler._ledger.of_epoch(0, 3)  # rank 0 has the only example
    changing.listeners[0]({1: 0, 2: 1})
    assert list(sampler) == []
    assert sampler.has_left()
    assert list(sampler) == [0]


def test_the_sampler_of_a_state_shards_anew_what_a_lost_rank_had(changing: Changing) -> None:
    sampler = ElasticSampler(range(9), shuffle=False)
    sampler._ledger = sampler._ledger.of_epoch(0, 3)
    state = ObjectState(sampler=sampler)
    sampler.record_batch(0, 1)
    state.save()
    for listener in changing.listeners:
        listener({0: 0})
    state.restore()
    assert sorted(state.sampler) == list(range(3, 9))


@pytest.mark.usefixtures("changing")
def test_an_epoch_ends_if_loaders_drop_what_is_left() -> None:
    sampler = ElasticSampler(range(10))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert sampler.has_left()
        for batch in range(len(sampler) // 4):
            sampler.record_batch(batch, 4)
        assert sampler.has_left()
        with pytest.warns(UserWarning, match="without 2 of its 10 examples.*drop_last=True"):
            assert not sampler.has_left()
    sampler.reset()
    assert sampler.has_left()
    sampler.set_epoch(1)  # as in a function of elastic.run that is called again before the first batch
    assert sampler.has_left()


@pytest.mark.usefixtures("changing")
@pytest.mark.parametrize(("examples", "repeated"), [(17, 1), (18, 0), (19, 0), (31, 1), (1, 1)])
@pytest.mark.parametrize("joins", [False, True])
def test_a_rank_repeats_an_example_only_in_the_place_of_a_whole_batch(
    examples: int, repeated: int, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("choros.elastic.sampler.size", lambda: 2)
    drawn, lengths = [], set()
    for rank in range(2):
        monkeypatch.setattr("choros.elastic.sampler.rank", lambda rank=rank: rank)
        sampler = ElasticSampler(range(examples))
        sampler.record_batch(0, 8)
        for epoch in (1, 2):
            sampler.set_epoch(epoch)
            if joins:
                assert sampler.has_left()
            lengths.add(len(sampler))
            drawn += list(sampler)
    assert lengths == {math.ceil(examples / 2)}
    assert len(drawn) == 2 * (examples + (0 if joins else repeated))
    assert set(drawn) == set(range(examples))


@pytest.mark.usefixtures("changing")
@patch("choros.elastic.sampler.size", lambda: 2)
def test_ranks_have_equal_numbers_of_batches_where_a_loader_reads_ahead() -> None:
    """No batch is recorded before all examples are drawn."""
    sampler = ElasticSampler(range(9))
    drawn = [_as_rank(rank, sampler) for rank in range(2)]
    assert [len(each) for each in drawn] == [5, 5]
    assert set(drawn[0] + drawn[1]) == set(range(9))


def _as_rank(rank: int, sampler: ElasticSampler) -> list[int]:
    with patch("choros.elastic.sampler.rank", lambda: rank):
        return list(sampler)


def test_a_sampler_goes_on_from_its_state(changing: Changing) -> None:
    sampler = ElasticSampler(range(10), seed=1)
    order = list(sampler)
    sampler.record_batch(0, 4)
    other = ElasticSampler(range(10), seed=1)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == order[4:]
    assert len(other) == 6
    other.record_indices(order[4:7])
    other.set_epoch(0)  # at the beginning of a function that is called again
    other.reset()
    assert list(other) == order[7:]
    other.record_batch(1, 3)
    assert list(other) == []
    other.set_epoch(0)
    assert list(other) == order
    other.set_epoch(1)
    assert sorted(other) == list(range(10))
    assert list(other) != order
    other.record_batch(0, 10)
    sampler.load_state_dict(other.state_dict())  # that of the last commit of an epoch
    sampler.set_epoch(1)
    assert list(sampler) == []
    sampler.set_epoch(2)
    assert sorted(sampler) == list(range(10))
    assert list(ElasticSampler(range(4), shuffle=False)) == [0, 1, 2, 3]
