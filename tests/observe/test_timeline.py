"""Timelines without ranks: parts, merging, clocks, the format, the summary, the command."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

import choros
from choros.cli import choros as choros_command
from choros.comm.recording import start_timeline, stop_timeline
from choros.errors import ConfigError, NotInitializedError
from choros.observe.events import Event, Kind
from choros.observe.timeline import (
    PartWriter,
    TimelinePart,
    part_path,
    parts_directory,
    read_part,
    remove_stale_parts,
)
from choros.settings import Config
from choros.trace.cli import collective_times, rank_times, summary_text, waits_of
from choros.trace.files import from_json, merge_parts, read_trace, to_json
from choros.trace.trace import BUCKETS, MOMENTS, STEPS, Interval, clock_map, collectives_of, merge
from observe.timelines import MS, call, check, part, read, record


def late_rank() -> list[TimelinePart]:
    """Rank 1 calls both collectives 50 ms after rank 0."""
    return [
        part(0, [*call("loss", 10, 60.5, 62, 1), *call("loss", 70, 120.5, 121, 2)]),
        part(1, [*call("loss", 60, 60.1, 62, 1), *call("loss", 120, 120.1, 121, 2)]),
    ]


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def test_no_part_is_written_where_a_link_points(tmp_path: Path) -> None:
    path = part_path(tmp_path / "run.json", 0)
    path.parent.mkdir()
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        PartWriter(tmp_path / "run.json", 0, 1)
    assert not (tmp_path / "target").exists()


def test_no_part_is_removed_where_a_link_points(tmp_path: Path) -> None:
    own = parts_directory(tmp_path / "mine.json")
    own.mkdir()
    (own / "rank-3.jsonl").write_text("recorded")
    parts_directory(tmp_path / "run.json").symlink_to(own)
    with pytest.raises(OSError, match="Not a directory"):
        remove_stale_parts(tmp_path / "run.json", 1)
    assert (own / "rank-3.jsonl").exists()


def test_a_part_has_what_was_written(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "new.json", 1, 2, mark_cycles=True)
    sets = {"collective": "allreduce"}
    writer.write(Event(Kind.COLLECTIVE_BEGUN, 'a "name"\n', details={**sets, "process_set": (0, 1)}))
    writer.write(Event(Kind.COLLECTIVE_BEGUN, "b", details={**sets, "process_set": (1,)}))
    before = read_part(writer.path.read_bytes())  # as it is found after a kill
    writer.write(Event(Kind.COLLECTIVE_MATCHED, "b", details={**sets, "number": 7, "waited": 0.1}))
    writer.write(Event(Kind.COLLECTIVE_DONE, "b", details={**sets, "bytes": 8, "seconds": 0.5}))
    written = read_part(writer.end())
    assert before.records == written.records[:2]
    assert (written.rank, written.size, written.host, written.mark_cycles) == (1, 2, os.uname().nodename, True)
    assert [each.details for each in written.records] == [
        sets, {**sets, "process_set": [1]}, {"number": 7}, {"bytes": 8},
    ]  # fmt: skip
    assert [each.name for each in written.records] == ['a "name"\n', "b", "b", "b"]
    assert {each.thread for each in written.records} == {threading.get_ident()}
    times = [written.began, *(each.time for each in written.records), written.ended]
    assert times == sorted(times)


def test_the_end_of_a_part_may_be_cut() -> None:
    part_of_one = b'{"part":1,"rank":0,"size":1,"host":"a","clock":"c","wall":0,"began":5,"mark_cycles":false}\n'
    lines = part_of_one + b'["commit","",7,1,{}]\n["something new","",8,1,{}]\n["commit","",9,1,{}]\n'
    for end in range(len(part_of_one), len(lines) - 1):
        found = read_part(lines[:end])
        assert len(found.records) <= 2
        assert found.ended in (5, 7, 8)
    for text in (b"", b"{}", b"[]", b'{"part":2}', b'{"part":1}', b'{"part":'):
        with pytest.raises(ValueError, match=r"part of a timeline|version|Expecting"):
            read_part(text)


def test_a_full_disk_ends_the_part_with_a_warning_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    writer = PartWriter(tmp_path / "run.json", 0, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        for _ in range(2):
            writer.write(Event(Kind.COMMIT))
    assert caplog.text.count("No space left") == 1
    assert read_part(writer.end()).records == ()


# ── merging ──────────────────────────────────────────────────────────────────────────────────────


def test_the_others_wait_for_the_last_rank() -> None:
    trace = merge(late_rank())
    collectives = collectives_of(trace.calls)
    assert [collective.last for collective in collectives] == [1, 1]
    assert [collective.waits for collective in collectives] == [{0: 50 * MS}] * 2
    assert [(each.wait, each.transfer) for each in trace.calls if each.rank == 0] == [
        (50.5 * MS, 1.5 * MS),
        (50.5 * MS, 0.5 * MS),
    ]


def test_calls_are_matched_by_number_and_not_by_name() -> None:
    """A rank without batches joins under its own name; after a mismatch, each rank has a call that others lack."""
    trace = merge(
        [
            part(0, [*call("a", 0, 1, 1, 1), *call("gradients", 2, 9, 10, 2), *call("a", 11, 12, 12, 3)]),
            part(1, [*call("b", 0, 1, 1, 1), *call("join", 8, 9, 10, 2), *call("a", 11, 12, 12, 3)]),
        ]
    )
    names = [{each.name for each in collective.calls} for collective in collectives_of(trace.calls)]
    assert names == [{"a", "b"}, {"gradients", "join"}, {"a"}]
    assert [name for name, *_ in collective_times(trace)] == ["gradients", "a"]


def test_a_thread_that_waits_for_its_turn_may_run_another_collective() -> None:
    nested = sorted([*call("b", 2, 3, 4, 1), *call("a", 0, 5, 6, 2)], key=lambda each: each.time)
    trace = merge([part(0, nested), part(1, nested)])
    assert [{(each.name, each.began) for each in collective.calls} for collective in collectives_of(trace.calls)] == [
        {("a", 0)}, {("b", 2 * MS)},
    ]  # fmt: skip
    check(json.loads("".join(to_json(trace))))


def test_process_sets_count_their_own_calls() -> None:
    first = [*call("x", 0, 1, 2, 1), *call("y", 3, 4, 5, 1, process_set=[0, 2])]
    again = call("z", 6, 7, 8, 1, process_set=[0, 2])  # the set was registered anew
    trace = merge(
        [part(0, first + again, size=3), part(1, call("x", 0, 1, 2, 1), size=3), part(2, first + again, size=3)]
    )
    found = [[each.rank for each in collective.calls] for collective in collectives_of(trace.calls)]
    assert found == [[0, 1, 2], [0, 2], [0, 2]]
    assert {each.ranks for each in trace.calls if each.name == "z"} == {(0, 2)}
    assert from_json("".join(to_json(trace))) == trace


def test_a_rank_that_was_killed_is_the_one_waited_for() -> None:
    trace = merge(
        [
            part(0, [*call("loss", 0, 1, 2, 1), *call("end", 3, None, None, 2), record(Kind.WAITING, "end", 2000)]),
            part(1, call("loss", 0, 1, 2, 1)),
        ]
    )
    assert (trace.calls[1].matched, trace.calls[1].bytes, trace.calls[1].wait) == (None, None, 1997 * MS)
    (waits,) = (each for each in waits_of(trace) if each.total)
    assert (waits.rank, waits.total, waits.collective) == (1, 1997 * MS, "end")
    assert from_json("".join(to_json(trace))) == trace


def test_a_rank_that_was_not_recorded_is_not_waited_for() -> None:
    trace = merge(late_rank()[:1])
    assert waits_of(trace) == []
    assert "2 ranks, of which 1 recorded (0)" in summary_text(trace)


def test_steps_buckets_and_moments() -> None:
    steps = [
        record(Kind.EPOCH_BEGUN, "model", 0, epoch=0),
        record(Kind.STEP_BEGUN, "", 1, step=1, examples=4),
        record(Kind.BUCKET_BEGUN, "", 2, bucket=0),
        record(Kind.BUCKET_DONE, "", 3, bucket=0),
        record(Kind.STEP_DONE, "", 4, step=1, seconds=0.1),
        record(Kind.CHECKPOINT, "model.keras", 5),
        record(Kind.STEP_BEGUN, "", 6, step=2),
        record(Kind.STEP_BEGUN, "", 7, step=3),  # the one before has failed
        record(Kind.STEP_DONE, "", 8, step=3),
    ]
    trace = merge([part(0, steps, size=1)])
    assert trace.intervals == (
        Interval(0, BUCKETS, "bucket 0", 2 * MS, 3 * MS, {}),
        Interval(0, STEPS, "step 1", MS, 4 * MS, {"examples": 4}),
        Interval(0, STEPS, "step 3", 7 * MS, 8 * MS, {}),
        Interval(0, "epochs", "epoch 0 of model", 0, 8 * MS, {"unfinished": True}),
        Interval(0, MOMENTS, "checkpoint: model.keras", 5 * MS, 5 * MS, {}),
    )
    check(json.loads("".join(to_json(trace))))
    (times,) = rank_times(trace)
    assert (times.steps, times.step, times.transferring) == (2, 6 * MS, MS)


def test_cycles_are_marked_on_request() -> None:
    parts = [part(0, call("loss", 0, 1, 2, 1), mark_cycles=True), part(1, call("loss", 0, 1, 2, 1))]
    assert merge(parts).intervals == (Interval(0, MOMENTS, "CYCLE_START", MS, MS, {}),)


def test_slices_that_overlap_are_in_different_threads() -> None:
    records = [*call("a", 0, 1, 9, 1), *call("b", 2, 3, 5, 2, thread=2), *call("c", 6, 7, 12, 3, thread=2)]
    data = json.loads("".join(to_json(merge([part(0, records, size=1)]))))
    check(data)
    threads = {event["tid"]: event["args"]["name"] for event in data["traceEvents"] if event["name"] == "thread_name"}
    assert sorted(threads.values()) == ["collectives", "collectives 2"]


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────


def two_clocks(late: float, drift: float = 0.0, seconds: float = 60.0) -> tuple[list[TimelinePart], float]:
    """The parts of two ranks on two hosts, and the offset of the clocks at the begin, in milliseconds.

    Args:
        late: the probability that the rank on host b is the last one; it is then up to 50 ms late.
        drift: by how much b's clock runs faster.
        seconds: the length of the timeline.
    """
    chance = random.Random(7)
    offset = 123_456_789.0
    records: dict[str, list] = {"a": [], "b": []}
    time, number = 5.0, 0
    while time < seconds * 1000:
        number += 1
        arrival = {"a": time, "b": time}
        arrival["b" if chance.random() < late else "a"] += chance.random() * 50
        last = max(arrival.values())
        for host, begun in arrival.items():
            # A rank that has waited long polls once a millisecond.
            notices = last + 0.03 + chance.random() * min(1.0, 0.1 * (last - begun))
            times = (begun, notices, notices + 1)
            clock = times if host == "a" else tuple((each * (1 + drift)) - offset for each in times)
            records[host] += call("loss", *clock, number)
        time = last + 20
    began = {"a": 0.0, "b": -offset}
    return [
        part(rank, records[host], host=host, began=round(began[host] * MS), wall=10**18)
        for rank, host in enumerate(("a", "b"))
    ], offset


@pytest.mark.parametrize("late", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("drift", [0.0, 50e-6, -50e-6])
def test_clocks_of_two_hosts_are_aligned(late: float, drift: float) -> None:
    """The error is at most the time in which a waiting rank notices the last one, 1 ms, and what 10 s drift apart."""
    parts, offset = two_clocks(late, drift)
    trace = merge(parts)
    begins = [call.began for call in trace.calls if call.rank == 1]
    true = [
        (each.time / MS + offset) / (1 + drift) * MS for each in parts[1].records if each.kind is Kind.COLLECTIVE_BEGUN
    ]
    errors = [abs(found - expected) for found, expected in zip(begins, true, strict=True)]
    assert max(errors) < 1.5 * MS
    waits = {each.rank: each for each in waits_of(trace) if each.longest > 2 * MS}
    assert set(waits) == {0.0: {0}, 0.5: {0, 1}, 1.0: {1}}[late]
    check(json.loads("".join(to_json(trace))))


def test_ranks_that_take_turns_to_be_last_bound_the_offset() -> None:
    """The median is moved into the bounds."""
    late_here = [((0, 300), (1290, 1300))] * 3  # offset ≥ 990
    late_there = [((290, 300), (1000, 1310))] * 1  # offset ≤ 1020
    assert clock_map(late_here + late_there, default=0)(0) == 1000
    assert clock_map([((0, 300), (1700, 1300))], default=0)(0) == 1350  # bounds that contradict each other


def test_clocks_without_a_common_collective_are_aligned_by_the_wall_clock() -> None:
    here, there = call("alone", 0, 1, 2, 1, process_set=[0]), call("alone", 500, 501, 502, 1, process_set=[1])
    trace = merge([part(0, here), part(1, there, host="b", wall=10**18 - 400 * MS, began=500 * MS)])
    assert [each.began for each in trace.calls] == [0, 100 * MS]


# ── the file and the summary ─────────────────────────────────────────────────────────────────────


def test_a_file_is_read_as_it_was_written() -> None:
    text = "".join(to_json(merge(late_rank())))
    check(json.loads(text))
    assert from_json(text) == merge(late_rank())
    waits = [event for event in json.loads(text)["traceEvents"] if event["name"] == "wait" and event["args"]]
    assert [(each["pid"], each["args"]["for_rank"]) for each in waits] == [(1, 1), (1, 1)]
    assert "start_time_since_epoch_in_micros" in text
    assert "NEGOTIATE_ALLREDUCE" in text


def test_the_summary_says_where_the_time_went_and_who_waited_for_whom() -> None:
    trace = merge(late_rank())
    rank = next(rank_times(trace))
    assert (rank.recorded, rank.waiting, rank.transferring, rank.computing) == (121 * MS, 101 * MS, 2 * MS, 18 * MS)
    (waits,) = waits_of(trace)
    assert (waits.rank, waits.collectives, waits.total, waits.median, waits.longest, waits.collective) == (
        1, 2, 100 * MS, 50 * MS, 50 * MS, "loss",
    )  # fmt: skip
    assert summary_text(trace).splitlines() == [
        "2 ranks, 121 ms",
        "",
        "rank  host  recorded  computing       waiting       transferring",
        "   0  a       121 ms      18 ms  15%   101 ms  83%          2 ms  2%",
        "   1  a       121 ms     118 ms  98%   200 µs   0%        2.8 ms  2%",
        "",
        "Ranks waited for each other 100 ms, added up over all ranks, 100% of it for rank 1.",
        "",
        "waited for  times  in all  median  longest  most in",
        "rank 1          2  100 ms   50 ms    50 ms  loss",
        "",
        "collective  kind       times  waiting  transferring  bytes",
        "loss        allreduce      2   101 ms        4.8 ms     32",
    ]


def test_the_command(tmp_path: Path) -> None:
    def ended(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "choros", "timeline", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    file = tmp_path / "run.json"
    file.write_text("".join(to_json(merge(late_rank()))))
    assert "rank 1          2  100 ms" in ended(str(file), "--summary")
    assert "2 ranks, 4 calls of collectives" in ended(str(file))
    assert f"{tmp_path}/none.json: there is no such timeline" in ended(f"{tmp_path}/none.json", code=2)
    assert "Missing argument 'FILE'.\nTry choros timeline --help." in ended(code=2)
    for text, why in (
        ("{}", "it has no events"),
        ("no JSON", ""),
        ('{"ranks": {}}', "--report is read by choros report"),
    ):
        file.write_text(text)
        assert re.search(f"not a timeline that choros has written: .*{why}", ended(str(file), code=2))


def test_the_help_teaches() -> None:
    result = CliRunner().invoke(choros_command, ["timeline", "--help"])
    for word in ("ui.perfetto.dev", "chorosrun", "start_timeline", "--summary", "--top", "waited for"):
        assert word in result.output


# ── one process ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMIX_", "HOROVOD_", "CHOROS_TIMELINE")):
            monkeypatch.delenv(name)
    yield
    choros.shutdown()


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("variable", ["CHOROS_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_variable_records_from_init_to_shutdown(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "new" / "run.json"
    monkeypatch.setenv(variable, str(file))
    choros.init()
    choros.global_process_set.communicator.allreduce(1, name="loss")
    assert [each.name for each in read_trace(file).calls] == ["start_timeline", "loss"]  # while the job runs
    assert not file.exists()
    choros.global_process_set.communicator.barrier()
    choros.shutdown()
    assert [each.name for each in read(file).calls] == ["start_timeline", "loss", "barrier"]
    assert not parts_directory(file).exists()


def test_the_directory_of_a_part_may_vanish_while_it_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank, which ends an earlier timeline of the same file, has removed the last part."""
    path = part_path(tmp_path / "run.json", 0)
    create = Path.mkdir

    def mkdir(directory: Path, *arguments: object, **more: object) -> None:
        create(directory, *arguments, **more)
        if not removed:
            directory.rmdir()
            removed.append(directory)

    removed: list[Path] = []
    monkeypatch.setattr(Path, "mkdir", mkdir)
    PartWriter(tmp_path / "run.json", 0, 1).end()
    assert path.exists()
    assert removed


@pytest.mark.usefixtures("_alone")
def test_dynamic_records_nothing_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    monkeypatch.chdir(tmp_path)
    choros.init()
    choros.shutdown()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_alone")
def test_a_file_that_cannot_be_written_is_an_error_of_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHOROS_TIMELINE", str(tmp_path))
    with pytest.raises(ConfigError, match="is a directory"):
        choros.init()
    assert not choros.is_initialized()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("_alone")
def test_parts_of_an_earlier_and_larger_job_are_not_merged(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for rank in (0, 1):
        PartWriter(file, rank, 2).end()
    choros.init()
    start_timeline(file)
    stop_timeline()
    assert read(file).size == 1


@pytest.mark.usefixtures("_alone")
def test_a_file_that_cannot_be_written_at_the_end_leaves_the_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.json"
    choros.init()
    start_timeline(file)
    file.mkdir()
    stop_timeline()
    assert "cannot be written" in caplog.text
    file.rmdir()
    assert merge_parts(file)
    assert read(file).size == 1


@pytest.mark.usefixtures("_alone")
def test_a_timeline_needs_init() -> None:
    for function, arguments in ((start_timeline, ("x.json",)), (stop_timeline, ())):
        with pytest.raises(NotInitializedError, match=function.__name__):
            function(*arguments)


@pytest.mark.usefixtures("_alone")
def test_without_a_timeline_nothing_is_imported_for_it() -> None:
    code = (
        "import sys, choros; choros.init(); choros.shutdown(); "
        "print([name for name in sys.modules if name.startswith('choros.trace')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"]


def test_the_variables() -> None:
    assert Config.from_environ({}).timeline is None
    both = {"CHOROS_TIMELINE": "a.json", "HOROVOD_TIMELINE": "b.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    assert (Config.from_environ(both).timeline, Config.from_environ(both).mark_cycles) == ("a.json", True)
    with pytest.raises(ConfigError, match="HOROVOD_TIMELINE_MARK_CYCLES='yes' is not one of 0, 1"):
        Config.from_environ({"HOROVOD_TIMELINE_MARK_CYCLES": "yes"})
