"""The events of training steps, as the reducer emits them."""

from collections.abc import Iterator

import numpy as np
import pytest

from choros.comm import Communicator, ProcessSet
from choros.comm.engines.threads import run_threads
from choros.observe import events
from choros.observe.events import Event, Kind
from choros.parallel.reduce.gradients import layout_of
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer

GRADIENTS = [np.ones((256, 256), np.float32)] * 3
LAYOUT = layout_of(GRADIENTS)


@pytest.fixture
def steps() -> Iterator[list[Event]]:
    found: list[Event] = []
    stop = events.listen(lambda event: found.append(event) if event.kind.startswith("step") else None)
    yield found
    stop()


def reducer(communicator: Communicator, **config: int) -> GradientReducer:
    process_set = ProcessSet(communicator.ranks)
    process_set.register(0, communicator.ranks, communicator)
    return GradientReducer(ReduceConfig(process_set=process_set, **config))


def test_each_step_of_each_rank_has_two_events(steps: list[Event]) -> None:
    def train(communicator: Communicator) -> None:
        mine = reducer(communicator)
        for _ in range(3 if communicator.rank == 0 else 2):
            mine.reduce(GRADIENTS, examples=4)
        mine.join(LAYOUT)

    run_threads(train, 2)
    begun = [event.details for event in steps if event.kind is Kind.STEP_BEGUN]
    done = [event.details for event in steps if event.kind is Kind.STEP_DONE]
    assert (
        sorted(details["step"] for details in begun)
        == sorted(details["step"] for details in done)
        == [1, 1, 2, 2, 3, 3]
    )
    assert [details["examples"] for details in begun if details["joined"]] == [0]


def test_a_step_in_buckets_is_one_step(steps: list[Event]) -> None:
    def train(communicator: Communicator) -> None:
        mine = reducer(communicator, bucket_bytes=1 << 18)
        buckets = mine.plan(LAYOUT)
        assert len(buckets) > 1
        for number, indices in enumerate(buckets):
            mine.send(number, [GRADIENTS[index] for index in indices], examples=4)

    run_threads(train, 2)
    assert sorted(event.kind.value for event in steps) == ["step begun"] * 2 + ["step done"] * 2
