"""Any sequence of deaths, joins and resumed jobs consumes each row of an epoch exactly once."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from choros.data.plan import Ledger, ShardBatches
from choros.topology import shard_range


@dataclass
class Epoch:
    """Ranks that train on ``batches`` global batches by a ledger, and what happens to them.

    Rows of ``micro_batches`` batches are consumed together; until then, each rank has those of its own.
    """

    rng: random.Random
    size: int
    rows: int
    batches: int
    last_rows: int
    micro_batches: int = 1
    consumed: Counter[tuple[int, int]] = field(default_factory=Counter)
    accumulated: int = 0
    pending: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pending = [[] for _ in range(self.size)]

    def length(self, shard: int, shards: int) -> int:
        start, end = shard_range(self.last_rows, shard, shards)
        return self.batches if end > start else self.batches - 1

    def rows_of(self, part: ShardBatches, batch: int) -> list[tuple[int, int]]:
        rows = self.last_rows if batch == self.batches - 1 else self.rows
        return [(batch, row) for row in range(*shard_range(rows, part.shard, part.shards))]

    def step(self, ledger: Ledger) -> Ledger:
        """The step of all ranks, in which some are lost."""
        while self.size > 1 and self.rng.random() < 0.15:  # a loss in the redone step, too
            ledger = self.lose(ledger)
        for rank in range(self.size):
            own = [part.closed(self.length) for part in ledger.of_rank(rank)]
            first = next(((part, part.batches[0]) for part in own if part.batches), None)
            if first is not None:
                self.pending[rank] += self.rows_of(*first)
        self.accumulated += 1
        if self.accumulated == self.micro_batches:
            self.exchange()
        return ledger.stepped()

    def exchange(self) -> None:
        self.consumed.update(itertools.chain(*self.pending))
        self.pending, self.accumulated = [[] for _ in range(self.size)], 0

    def lose(self, ledger: Ledger) -> Ledger:
        lost = self.rng.sample(range(self.size), self.rng.randint(1, min(2, self.size - 1)))
        survivors = [rank for rank in range(self.size) if rank not in lost]
        self.size = len(survivors)
        self.pending = [self.pending[rank] for rank in survivors]
        return ledger.lost({old: new for new, old in enumerate(survivors)}, self.accumulated)

    def between_steps(self, ledger: Ledger) -> Ledger:
        if self.accumulated:
            if self.rng.random() < 0.03:  # too few are left, and commit
                ledger = ledger.taken_back(self.accumulated).resumed(self.size, self.length)
                self.pending, self.accumulated = [[] for _ in range(self.size)], 0
            return ledger
        if self.rng.random() < 0.15:
            ledger = ledger.joined(self.size)
            self.size += 1
        if self.rng.random() < 0.1:
            ledger = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
            self.size = self.rng.randint(1, min(5, self.rows))
            resumed = ledger.resumed if self.rng.random() < 0.5 else ledger.resharded
            ledger = resumed(self.size, self.length)
        self.pending = [[] for _ in range(self.size)]
        return ledger

    def run(self) -> Ledger:
        ledger = Ledger.of_epoch(0, self.size)
        while not ledger.is_done(self.length) or self.accumulated:
            if not any(part.closed(self.length).batches for rank in range(self.size) for part in ledger.of_rank(rank)):
                self.exchange()
                ledger = ledger.resharded(self.size, self.length)
            else:
                ledger = self.between_steps(self.step(ledger))
        return ledger


@pytest.mark.parametrize("seed", range(200))
def test_each_row_is_consumed_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.randint(5, 9)
    epoch = Epoch(rng, rng.randint(1, 5), rows, rng.randint(1, 12), rng.randint(1, rows), rng.choice([1, 1, 2, 5]))

    epoch.run()

    sizes = [epoch.rows] * (epoch.batches - 1) + [epoch.last_rows]
    assert epoch.consumed == Counter((batch, row) for batch, size in enumerate(sizes) for row in range(size))


def four(shard: int, shards: int) -> int:
    return 4


def test_survivors_keep_their_shards() -> None:
    ledger = Ledger.of_epoch(0, 3).stepped().lost({0: 0, 2: 1})
    assert [ledger.of_rank(rank)[0].shard for rank in (0, 1)] == [0, 2]
    assert [part.closed(four) for rank in (0, 1) for part in ledger.of_rank(rank)] == [
        ShardBatches(0, 3, range(1, 4)),
        ShardBatches(2, 3, range(1, 4)),
    ]


def test_a_batch_whose_rank_was_lost_in_its_step_is_left_over() -> None:
    ledger = Ledger.of_epoch(0, 2).stepped(2).lost({0: 0}).stepped(2)
    assert ledger.left_over(four) == (ShardBatches(1, 2, range(2, 4)),)


def test_micro_batches_of_a_lost_rank_are_left_over() -> None:
    ledger = Ledger.of_epoch(0, 2).stepped(3).lost({0: 0}, accumulated=2).stepped()
    assert ledger.left_over(four) == (ShardBatches(1, 2, range(1, 4)),)


def test_a_new_rank_takes_over_from_the_current_step() -> None:
    ledger = Ledger.of_epoch(0, 2).stepped().lost({1: 0}).stepped(2).joined(1)
    assert ledger.of_rank(1)[0].shard == 0
    assert ledger.stepped().left_over(four) == (ShardBatches(0, 2, range(1, 3)),)


def test_a_new_rank_without_a_free_shard_waits() -> None:
    ledger = Ledger.of_epoch(0, 2).joined(2)
    assert ledger.of_rank(2) == ()
    assert ledger.of_rank(2) == ()


def test_a_rank_lost_in_the_tail_leaves_its_batches_once_more() -> None:
    tail = Ledger.of_epoch(0, 3).lost({0: 0, 1: 1}).stepped(4).resharded(2, four)
    assert tail.is_tail
    ledger = tail.lost({1: 0}).stepped(2)
    assert ledger.left_over(four) == (ShardBatches(2, 3, range(0, 4, 2)),)
    assert ledger.resharded(1, four).stepped(2).is_done(four)


def test_what_is_left_over_of_several_shards_is_divided_evenly() -> None:
    ledger = Ledger.of_epoch(0, 3).stepped(2).lost({0: 0, 1: 1}).stepped().lost({0: 0}).stepped()
    assert [len(part.batches) for part in ledger.left_over(four)] == [1, 2]
    tail = ledger.resharded(3, four)
    assert [sum(len(part.batches) for part in tail.of_rank(rank)) for rank in range(3)] == [1, 1, 1]


def test_shards_that_ended_before_their_rank_was_lost_leave_nothing() -> None:
    def length(shard: int, shards: int) -> int:
        return 4 if shard == 0 else 3

    assert Ledger.of_epoch(0, 2).stepped(4).lost({0: 0}).is_done(length)


@pytest.mark.parametrize("size", [1, 3])
def test_a_resumed_job_divides_what_nobody_has_begun_anew(size: int) -> None:
    ledger = Ledger.of_epoch(5, 2).stepped().lost({0: 0}).stepped().resumed(size, four)
    assert (ledger.epoch, ledger.first, ledger.steps) == (5, 2, 0)
    assert [part.closed(four) for rank in range(size) for part in ledger.of_rank(rank)] == [
        ShardBatches(rank, size, range(2, 4)) for rank in range(size)
    ]
    assert ledger.stepped(2).left_over(four) == (ShardBatches(1, 2, range(1, 2)),)


def test_a_job_that_is_resumed_in_the_tail_has_no_other_batches() -> None:
    tail = Ledger.of_epoch(5, 4).lost({0: 0, 3: 1}).stepped(4).resharded(2, four).stepped()
    resumed = tail.resumed(3, four)
    assert [resumed.of_rank(rank) for rank in range(3)] == [()] * 3
    assert resumed.lacks_owners
    assert resumed.left_over(four) == tail.left_over(four)


def test_what_is_left_over_stays_small_however_many_batches_it_has() -> None:
    def length(shard: int, shards: int) -> int:
        return 10**9

    ledger = Ledger.of_epoch(0, 64).lost({rank: rank for rank in range(63)}).stepped(10**9).resharded(63, length)
    assert len(json.dumps(ledger.to_json())) < 10_000
    batches = itertools.chain(*(part.batches[:2] for rank in range(63) for part in ledger.of_rank(rank)))
    assert sorted(batches) == list(range(126))


def test_json_keeps_all() -> None:
    ledger = Ledger.of_epoch(1, 3).stepped().lost({0: 0, 2: 1}).stepped().joined(2).stepped().lost({0: 0, 1: 1})
    for each in (ledger, ledger.resumed(2, four), ledger.resharded(2, four)):
        assert Ledger.from_json(json.loads(json.dumps(each.to_json()))) == each
