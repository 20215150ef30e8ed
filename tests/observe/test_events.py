import json
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from choros.comm import Communicator, Reduction
from choros.comm.engines.local import LocalCommunicator
from choros.comm.engines.threads import run_threads
from choros.observe import events, listeners
from choros.observe.events import Event, Kind
from choros.observe.listeners import writer_to
from choros.settings import Config


@pytest.fixture
def received() -> Iterator[list[Event]]:
    found: list[Event] = []
    stop = events.listen(found.append)
    yield found
    stop()


def test_a_collective_is_begun_matched_and_done(received: list[Event]) -> None:
    LocalCommunicator().allreduce(np.ones(4, np.float32), Reduction.SUM, name="loss")
    assert [event.kind for event in received] == [Kind.COLLECTIVE_BEGUN, Kind.COLLECTIVE_MATCHED, Kind.COLLECTIVE_DONE]
    assert {event.name for event in received} == {"loss"}
    done = received[-1].details
    assert (done["bytes"], done["collective"], done["process_set"]) == (16, "allreduce", (0,))


def test_events_show_the_wait_for_a_late_rank(received: list[Event]) -> None:
    gate = threading.Event()

    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            gate.wait()
        else:
            threading.Timer(0.2, gate.set).start()
        communicator.barrier(name="meet")

    run_threads(body, 2)
    waited = [event.details["waited"] for event in received if event.kind is Kind.COLLECTIVE_MATCHED]
    assert len(waited) == 2
    assert max(waited) > 0.1


def test_a_collective_ends_when_the_next_one_begins_in_the_same_section(received: list[Event]) -> None:
    communicator = LocalCommunicator()
    communicator.start("", lambda: [communicator.barrier(name=name) for name in ("first", "second")]).wait()
    assert [(event.kind.split()[1], event.name) for event in received if event.kind is not Kind.COLLECTIVE_MATCHED] == [
        ("begun", "first"),
        ("done", "first"),
        ("begun", "second"),
        ("done", "second"),
    ]
    communicator.close()


def test_a_collective_that_fails_is_done_too(received: list[Event]) -> None:
    with pytest.raises(ValueError, match="root"):
        LocalCommunicator().broadcast([1.0], root=7)
    assert received[-1].kind is Kind.COLLECTIVE_DONE


def test_no_events_are_created_without_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "Event", None)
    events.emit(Kind.COMMIT)
    LocalCommunicator().barrier()


def test_events_survive_json() -> None:
    event = Event(Kind.CHECKPOINT, "model.keras", rank=2, time=1.5, details={"step": 3})
    assert Event.from_json(event.to_json()) == event
    for text in ("", "[]", "{}", '{"kind": "nonsense"}', '{"kind": "commit", "colour": 1}'):
        with pytest.raises(ValueError, match=r"event|Expecting|nonsense"):
            Event.from_json(text)


def test_a_full_pipe_drops_events_and_reports_their_number() -> None:
    reader, writer = os.pipe()
    write, sent = writer_to(writer), 2000
    for number in range(sent):
        write(Event(Kind.STEP_DONE, "x" * 50, details={"number": number}))
    os.set_blocking(reader, True)
    first = os.read(reader, 1 << 20).splitlines()
    assert 0 < len(first) < sent
    write(Event(Kind.STEP_DONE))
    assert json.loads(os.read(reader, 1 << 20))["details"] == {"lost": sent - len(first)}
    os.close(reader)
    write(Event(Kind.STEP_DONE))  # the reader is closed: no error
    os.close(writer)


def test_an_event_that_is_too_long_for_one_write_is_cut() -> None:
    reader, writer = os.pipe()
    writer_to(writer)(Event(Kind.COLLECTIVE_DONE, "n" * 9999, details={"bytes": 4, "collective": "c" * 9999}))
    event = Event.from_json(os.read(reader, 1 << 20))
    assert event.name.startswith("nnn")
    assert event.details == {"bytes": 4}
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("value", "text"), [((0, 1, 2, 3), "0-3"), ((0, 2), "0,2"), ((), ""), (0.25, "0.25"), (7, "7"), ("a", "a")]
)
def test_details_are_brief(value: events.Detail, text: str) -> None:
    assert str(Event(Kind.COMMIT, details={"it": value})) == f"commit (it={text})"


def test_a_listener_that_is_removed_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Event] = []
    starts = (lambda *_: events.listen(received.append), lambda *_: None)  # the second one is not enabled
    monkeypatch.setattr(listeners, "LISTENERS", starts)
    stop = listeners.start_listeners(Config.from_environ({}), {})
    events.emit(Kind.COMMIT)
    stop()
    events.emit(Kind.COMMIT)
    assert len(received) == 1
