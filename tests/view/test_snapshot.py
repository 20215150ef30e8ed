"""What the view shows of a record, as values and as text."""

import pytest

from choros.launch.driver import job_record
from choros.launch.driver.job_record import JobRecord, RankRecord, screen_lines
from choros.launch.protocol.frames import Start
from choros.observe.events import Event, Kind
from choros.observe.progress import RankProgress
from choros.view.snapshot import cells, curve, table, view_of

BEGAN = 1000.0


def done(rank, steps):
    """Progress in which rank 0 waits, and rank 1 loads, for half of the time."""
    spent = {"waiting": steps / 20} if rank == 0 else {"loading": steps / 20}
    return RankProgress(rank, steps, seconds=steps / 10, examples=8.0 * steps, memory=10**9, **spent)


def record_of(*seconds, batch=0):
    """The record of a job that makes ten steps a second on two ranks, as JSON."""
    record = JobRecord(["python", "train.py"], 2, {}, began=BEGAN)
    for rank in range(2):
        record.start(Start(rank, f"host{rank}", 7 + rank))
        for second in seconds:
            record.ranks[rank].moments.note(done(rank, 10 * second), BEGAN + second)
    if batch:
        for at, now in ((0.0, 0), (10.0, batch)):
            details = {"epoch": 2, "epochs": 4, "batch": now, "batches": 100, "logs": {"loss": 2.0 - now / 100}}
            record.note_metrics(Event(Kind.METRICS, "model", 0, BEGAN + at, details))
    return record.to_json()


def test_rates_and_shares_are_those_of_the_last_seconds():
    view = view_of(record_of(*range(1, 30)), BEGAN + 30)
    assert (view.steps_per_second, view.examples_per_second) == (10.0, 160.0)
    assert view.title == "2 ranks on 2 hosts, 0:30: python train.py"
    assert view.ranks[0].shares["waiting"] == pytest.approx(0.5)
    assert view.ranks[1].shares["loading"] == view.ranks[1].shares["computing"] == pytest.approx(0.5)
    assert view.verdict[1].startswith("input-bound on rank 1")


def test_with_an_older_record_they_are_those_since_then():
    earlier, now = record_of(1, 2), record_of(1, 2, 4)
    now["ranks"]["0"]["steps"][-1] += 20
    view = view_of(now, BEGAN + 4, earlier)
    assert [rank.steps_per_second for rank in view.ranks] == [20.0, 10.0]


def test_a_rank_that_sends_nothing_any_more_makes_no_steps():
    record = record_of(*range(1, 30))
    record["ranks"]["1"]["times"] = [at - 20 for at in record["ranks"]["1"]["times"]]
    assert [rank.steps_per_second for rank in view_of(record, BEGAN + 30).ranks] == [10.0, 0.0]


def test_a_loop_whose_batches_have_no_number_of_examples():
    record = record_of(*range(1, 30))
    for rank in record["ranks"].values():
        rank["examples"] = list(map(float, rank["steps"]))
    view = view_of(record, BEGAN + 30)
    assert (view.steps_per_second, view.examples_per_second) == (10.0, 0.0)
    assert "examples/s" not in table(view).splitlines()[1]


def test_ranks_that_have_not_begun():
    view = view_of(record_of(), BEGAN + 1)
    assert view.steps_per_second == 0.0
    assert view.ranks[0].shares is None
    assert view.fit == ""
    assert "0.00 steps/s" in table(view)


def test_time_left_is_as_long_as_what_was_done_took():
    view = view_of(record_of(1, 2, batch=50), BEGAN + 10)
    assert view.done == pytest.approx(0.375)  # of four epochs one and a half
    assert view.fit.endswith(", 37 %, 0:50 left")  # 10.0 / 0.125 * 0.625


def test_a_second_fit_begins_anew():
    record = JobRecord(["train"], 1, {}, began=BEGAN)
    for at, epoch, logs in ((0, 3, {"loss": 1.0}), (10, 1, {"loss": float("nan")}), (20, 2, {"accuracy": 0.5})):
        details = {"epoch": epoch, "epochs": 4, "batch": 0, "batches": 10, "logs": logs}
        record.note_metrics(Event(Kind.METRICS, "model", 0, BEGAN + at, details))
    written = record.to_json()
    view = view_of(written, BEGAN + 20)
    assert view.fit.endswith(", 0:30 left")
    assert list(view.metrics) == ["loss", "accuracy"]
    assert written["metrics"][1]["logs"] == {"loss": None}
    assert curve(view.metrics["loss"], 10) == "▁×"


def test_metrics_without_epochs_or_batches():
    record = JobRecord(["train"], 1, {}, began=BEGAN)
    record.note_metrics(Event(Kind.METRICS, "model", 0, BEGAN, {"batch": 3}))
    view = view_of(record.to_json(), BEGAN)
    assert (view.fit, view.done) == ("epoch 0, batch 3", 0.0)


def test_the_last_moment_is_kept():
    rank = RankRecord()
    for tenth in range(5 * job_record._MOST):
        rank.moments.note(RankProgress(0, steps=tenth), tenth / 10)
        assert rank.moments.noted[-1][1].steps == tenth


def test_the_output_is_what_the_screen_shows_last():
    record = JobRecord(["train"], 1, {})
    for number in range(10_000):
        record.print(f"{number}\n".encode())
    lines = record.to_json()["output"]
    assert lines[-1] == "9999"
    assert len(lines) < 10_000
    assert screen_lines(b"a\x1b[K\r\x1b[36m[0] \x1b[0mb\n\nc") == ["[0] b", "", "c"]


def test_a_table_has_all_of_it():
    record = record_of(*range(1, 30), batch=50)
    record["messages"] = [[BEGAN, "chorosrun: rank 1 is slow."]]
    record["output"] = ["[0] Epoch 2"]
    lines = table(view_of(record, BEGAN + 30)).splitlines()
    assert lines[0] == "2 ranks on 2 hosts, 0:30: python train.py"
    assert lines[1].startswith("epoch 2 of 4, batch 50 of 100, 37 %, 0:50 left")
    assert lines[2] == "10.0 steps/s, 160 examples/s"
    assert lines[3] == "loss 1.5"
    assert lines[5].split() == ["0", "host0", "290", "10.0", "80.0", "50%", "0%", "50%", "0%", "0%", "0%", "954", "MiB"]
    assert lines[-2:] == ["chorosrun: rank 1 is slow.", "[0] Epoch 2"]


def test_nothing_reaches_the_terminal_but_text():
    """Neither of a metric's name, nor of what ranks have written or raised."""
    record = JobRecord(["train", "\x1b]0;a\x07"], 1, {})
    logs = {"loss\x1b]0;b\x07": 1.0}
    details = {"logs": logs, "epoch": 1, "epochs": 2, "batch": 1, "batches": 2}
    record.note_metrics(Event(Kind.METRICS, "", 0, BEGAN, details))
    record.show("chorosrun: rank 0 failed:\nValueError: \x1b]52;c;c\x07\x1b[2J")
    record.print("a\x9b2J b\x9d0;c\x9c d\x1b]0;e\x07\n".encode())
    text = table(view_of(record.to_json(), BEGAN))
    assert [each for each in text if not each.isprintable() and each != "\n"] == []
    assert "loss]0;b 1\n" in text
    assert "rank 0 failed:\nValueError: ]52;c;c\na b0;c d]0;e" in text


def test_the_cells_of_a_bar_are_as_many_as_there_are():
    shares = {"computing": 0.334, "loading": 0.333, "waiting": 0.333}
    assert all(sum(cells(shares, width).values()) == width for width in range(100))


def test_an_ended_job():
    assert "ended with exit code 3" in table(view_of(record_of(1) | {"code": 3}, BEGAN + 1))
