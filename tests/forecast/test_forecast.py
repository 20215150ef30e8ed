"""Forecasts: what is read from a timeline, what links cost, and what follows for more ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from choros.errors import ConfigError
from choros.forecast.cli import PROFILES, forecast, link_of, parse_link
from choros.forecast.costs import Link, Machines, allreduce_s, control_s, messages_s, slices_s
from choros.forecast.model import Failures, Setting, best, memory_of, predict, settings
from choros.forecast.workload import Bucket, Workload, expected_maximum, workload_of
from choros.observe.events import Kind
from choros.observe.timeline import Record
from choros.trace.files import from_json, to_json
from choros.trace.trace import Trace, merge
from launch.launched import rank_script, run
from observe.timelines import part, record

FAST, SLOW = Link("memory", 0.0, 1e15), Link("slow", 1e-3, 1e6)
MIB = 1 << 20


def step(number: int, begun: float, matched: float, done: float, buckets: Sequence[float] = ()) -> list[Record]:
    """A step whose ``buckets`` after the first begin at these times; milliseconds."""
    edges = [*buckets, done]
    records = [record(Kind.COLLECTIVE_BEGUN, "gradients", begun, collective="gradients")]
    for bucket, end in enumerate(edges):
        begin = matched if bucket == 0 else edges[bucket - 1]
        if bucket:
            records.append(record(Kind.COLLECTIVE_BEGUN, f"bucket {bucket}", begin, collective="gradients"))
        records.append(record(Kind.COLLECTIVE_MATCHED, "gradients", begin, number=10 * number + bucket))
        if bucket == 0:
            records.append(record(Kind.STEP_BEGUN, "", begin, step=number, examples=8, joined=False))
        records.append(record(Kind.BUCKET_BEGUN, "", begin, bucket=bucket, arrays=2))
        records.append(record(Kind.BUCKET_DONE, "", end, bucket=bucket))
        if bucket == len(edges) - 1:
            records.append(record(Kind.STEP_DONE, "", end, step=number))
        records.append(record(Kind.COLLECTIVE_DONE, "gradients", end, bytes=4 * MIB))
    return records


def timeline(late: float = 4.0, hosts: str = "aa") -> Trace:
    """Two ranks, of which the second computes for ``late`` ms longer, from 0 on, with steps of 100 ms."""
    parts = []
    for rank in (0, 1):
        records = [record(Kind.EPOCH_BEGUN, "", 0, epoch=0)]
        for number in range(1, 6):
            begin = 100.0 * number
            records += step(number, begin - 10 + rank * late, begin - 10 + late, begin)
        parts.append(part(rank, [*records, record(Kind.EPOCH_DONE, "", 510, epoch=0)], host=hosts[rank]))
    return merge(parts)


def test_the_work_of_a_step() -> None:
    work = workload_of(timeline())
    assert (work.ranks, work.hosts, work.steps_per_epoch) == (2, 1, 5)
    assert work.compute_s == pytest.approx(0.092)
    assert work.buckets == (Bucket(4 * MIB, 2, work.compute_s),)
    assert work.transfer_s == pytest.approx(0.006)
    assert work.deviations == pytest.approx([-0.002 * 2**0.5] * 4 + [0.002 * 2**0.5] * 4)


def test_buckets_of_the_backward_pass_and_other_collectives() -> None:
    starts = [100.0 * number for number in range(1, 5)]
    records = [each for start in starts for each in step(int(start) // 100, start, start, start + 60, [start + 40])]
    loss = [
        record(Kind.COLLECTIVE_BEGUN, "loss", 370, collective="allreduce"),
        record(Kind.COLLECTIVE_MATCHED, "loss", 371, number=99),
        record(Kind.COLLECTIVE_DONE, "loss", 380, bytes=8),
    ]
    index = next(index for index, each in enumerate(records) if each.time > 370e6)
    work = workload_of(merge([part(0, [*records[:index], *loss, *records[index:]], size=1)]))
    assert work.compute_s == pytest.approx(0.080)
    assert [each.ready_s for each in work.buckets] == pytest.approx([0.040, 0.080])
    one = workload_of(merge([part(0, records[:index] + loss + records[index:], size=1)]))
    assert one.deviations == pytest.approx([-0.010, 0.0, 0.0], abs=1e-9)


def test_a_timeline_without_steps() -> None:
    with pytest.raises(ConfigError, match="has 0 steps whose gradients"):
        workload_of(merge([part(0, [record(Kind.EPOCH_BEGUN, "", 0, epoch=0)], size=1)]))
    steps = tuple(each for each in timeline().intervals if each.track != "buckets")  # as with the xla engine
    with pytest.raises(ConfigError, match="has 0 steps whose gradients"):
        workload_of(replace(timeline(), intervals=steps))


def test_an_epoch_that_was_not_recorded_to_its_end_has_no_number_of_steps() -> None:
    whole = timeline()
    assert workload_of(whole).steps_per_epoch == 5
    records = [
        record(Kind.EPOCH_BEGUN, "", 0, epoch=0),
        *(each for n in (1, 2, 3, 4) for each in step(n, 100 * n, 100 * n, 100 * n + 9)),
    ]
    cut = merge([part(rank, records) for rank in (0, 1)])
    assert workload_of(from_json("".join(to_json(cut)))).steps_per_epoch is None


def test_the_straggler_is_the_maximum_of_draws() -> None:
    values = [0.0, 0.0, 0.0, 1.0]
    assert [expected_maximum(values, count) for count in (1, 2)] == [0.25, 1 - 0.75**2]
    assert expected_maximum(values, 10**6) == pytest.approx(1.0)
    work = Workload(2, 1, 1.0, tuple(values), (), 0.0)
    waits = [work.straggler_s(ranks) for ranks in (1, 2, 8, 64)]
    assert waits[0] == 0
    assert waits == sorted(waits)


@pytest.mark.parametrize(
    ("text", "latency", "rate"),
    [("100Mbit,5ms", 5e-3, 1e8), ("1.5Gbit/s, 50 us", 50e-6, 1.5e9), ("2kbit,1s", 1, 2e3), ("9bit,7ns", 7e-9, 9)],
)
def test_links(text: str, latency: float, rate: float) -> None:
    link = parse_link("--net", text)
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(latency), rate / 8)
    assert all(parse_link("--net", name) is profile for name, profile in PROFILES.items())


@pytest.mark.parametrize(
    "text", ["", "10Gbit", "10Gbit,", "fast,1ms", "0Gbit,1ms", "10GB,1ms", "1Gbit,1", "ethernet-7"]
)
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(ConfigError, match="expected BANDWIDTH,LATENCY, such as 10Gbit,20us"):
        parse_link("--net", text)


def test_a_link_is_fitted_to_allreduces(tmp_path: Path) -> None:
    def row(peer: str, size: int, seconds: float, ranks: int = 2) -> dict[str, object]:
        return {"bench": "allreduce", "peer": peer, "ranks": ranks, "bytes": size, "median_s": seconds}

    machines = Machines(Link("", 1e-4, 1e8), FAST)
    sizes = (1000, 10**6, 10**8)
    rows = [row("choros", size, control_s(2, machines) + allreduce_s(2, size, machines)) for size in sizes]
    file = tmp_path / "sums.json"
    file.write_text(json.dumps({"rows": [*rows, row("mpi4py", 1000, 9.0), row("choros", 1000, 1.0, ranks=1)]}))
    link = link_of("--net", str(file))
    assert (link.latency_s, link.bytes_per_s) == (pytest.approx(1e-4, rel=0.05), pytest.approx(1e8, rel=0.01))
    assert "fitted to 2 ranks: α = 101" in link.name
    file.write_text(json.dumps({"rows": rows[:1]}))
    with pytest.raises(ConfigError, match="a fit needs allreduces of two sizes"):
        link_of("--net", str(file))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="it is no file of choros bench allreduce"):
        link_of("--net", str(file))


def test_messages() -> None:
    link = Link("", 1.0, 1e3)
    assert link.message(64 << 10) == 1 + 65.536
    assert link.message(128 << 10) == 3 + 131.072  # with a request and an answer
    assert messages_s(1, 10**6, link) == 0
    assert messages_s(8, 1000, link) == 3 * 2
    assert messages_s(2, 10**6, link) == 2 * link.message(5e5)
    # Ranks beyond a power of two cost the others their whole sum once more, and half of it twice; and one of two that
    # exchange halves is early, so that its answer comes after its half, or after what a socket holds of that.
    odd = 2 * link.message(5e5) + link.message(10**6)
    assert messages_s(3, 10**6, link) - messages_s(2, 10**6, link) == pytest.approx(odd + 500)
    odd = 2 * link.message(5e6) + link.message(10**7)
    assert messages_s(3, 10**7, link) - messages_s(2, 10**7, link) == pytest.approx(odd + 524.288)


def test_ranks_of_a_host_share_its_link() -> None:
    alone, shared = Machines(SLOW, FAST, 1), Machines(SLOW, FAST, 8)
    assert allreduce_s(8, 4 * MIB, shared) == 0  # nothing leaves the host
    assert allreduce_s(16, 4 * MIB, shared) == pytest.approx(4 * MIB / 1e6 + 2 * 3e-3)
    assert allreduce_s(16, 4 * MIB, alone) > allreduce_s(16, 4 * MIB, shared)
    # int8 sums nothing within a host: each of 8 ranks sends to the 8 of the other host.
    assert slices_s(16, 4 * MIB, shared) == pytest.approx(2 * (8 * 8 * 4 * MIB / 4 * (1 + 4 / 256) / 16 / 1e6 + 3e-3))


def test_overlap_hides_what_is_sent_during_the_backward_pass() -> None:
    work = Workload(2, 1, 1.0, (0.0,), (Bucket(10**6, 1, 0.5), Bucket(10**6, 1, 1.0)), 0.0)
    machines = Machines(Link("", 0.0, 1e7), FAST)
    plain = predict(work, 2, Setting("plain"), machines)
    overlap = predict(work, 2, Setting("overlap", overlaps=True), machines)
    assert plain.exchange_s == pytest.approx(0.2, rel=1e-3)
    assert overlap.exchange_s == pytest.approx(0.1, rel=1e-3)
    # Without recorded buckets it is two thirds of the step, in buckets of 8 MiB.
    one = replace(work, buckets=(Bucket(32 * MIB, 8, 1.0),))
    assert predict(one, 2, Setting("overlap", overlaps=True), machines).exchange_s == pytest.approx(
        1 / 3 + 1 / 6 + 4 * 0.8388608 - 1, rel=1e-3
    )


def test_the_best_depends_on_the_link() -> None:
    work = Workload(2, 1, 0.1, (0.0,), (Bucket(16 * MIB, 16, 0.1),), 0.03)
    ways = [each for each in settings(16, 4) if each.every == 1]
    slow, fast = (
        best([predict(work, 64, each, Machines(link, memory_of(work), 1)) for each in ways]).setting
        for link in (PROFILES["ethernet-1"], PROFILES["nvlink"])
    )
    assert (slow, fast) == ("power_sgd(4)", "overlap")


def test_failures() -> None:
    failures = Failures(mtbf_s=1000 * 3600, checkpoint_s=10, restart_s=60)
    assert failures.restarting(1) < failures.restarting(64) < failures.restarting(512)
    assert failures.in_place(512, step_s=1.0) < failures.restarting(512)
    assert failures.restarting(10**8) == math.inf  # none ever gets through
    # Young's interval is the best one: half or twice of it costs more.
    mean, interval = 1000 * 3600 / 64, (2 * 10 * 1000 * 3600 / 64) ** 0.5
    assert failures.restarting(64) == pytest.approx(
        1 + 60 / mean + 10 / interval + (interval + 10) / 2 / mean, rel=1e-3
    )


def test_the_command(tmp_path: Path) -> None:
    file, drawn, written = tmp_path / "run.json", tmp_path / "plot.png", tmp_path / "out.json"
    file.write_text("".join(to_json(timeline())))
    given = f"{file} --np 4,1,16 --net 1Gbit,50us --per-host 4 --price 3.6 --mtbf 1000 --plot {drawn} --json {written}"
    done = CliRunner().invoke(forecast, given.split(), catch_exceptions=False)
    assert "recorded on 2 ranks: 92 ms of computation a step, 4 MiB of gradients" in done.output
    assert "Best, with the speed of a rank against one alone: plain on 1 rank (100%), " in done.output
    assert drawn.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(written.read_text())["forecasts"]
    assert [row["ranks"] for row in rows] == [1] + [4] * 7 + [16] * 7
    plain = rows[1]
    assert plain["step_s"] == pytest.approx(plain["compute_s"] + plain["straggler_s"] + plain["exchange_s"])
    # 5 steps of 2 ranks are 3 of 4 ranks.
    assert plain["epoch_cost"] == pytest.approx(3 * plain["step_s"] * 4 * 3.6 / 3600)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("missing.json --np 4 --net 1Gbit,1ms", "there is no such timeline"),
        ("run.json --np 0 --net 1Gbit,1ms", "--np 0: expected positive whole numbers"),
        ("run.json --np 4 --net 1Gbit,1ms --price 1", "the timeline has no epoch. Give the steps of one: --steps N"),
        ("run.json --np 4 --net 1Gbit,1ms --plot missing/x.png", "--plot missing/x.png: cannot be written"),
    ],
)
def test_errors(given: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = timeline()
    steps = tuple(each for each in trace.intervals if each.track != "epochs")
    Path("run.json").write_text("".join(to_json(replace(trace, intervals=steps))))
    with pytest.raises(ConfigError, match=problem):
        CliRunner().invoke(forecast, given.split(), catch_exceptions=False)


LOOP = """
import choros, numpy
from choros.parallel.reduce.plan import ReduceConfig
from choros.parallel.reduce.reducer import GradientReducer
choros.init()
reducer = GradientReducer(ReduceConfig())
for step in range(6):
    reducer.reduce([numpy.ones(5 << 18, numpy.float32)], examples=8)
"""


@pytest.mark.slow
def test_a_job_is_forecast_from_its_timeline(tmp_path: Path) -> None:
    file, script = tmp_path / "run.json", rank_script(tmp_path / "script.py", LOOP)
    assert run("-np", 2, "--timeline-filename", file.name, sys.executable, script, cwd=tmp_path).code == 0
    command = [sys.executable, "-m", "choros", "forecast", str(file), "--np", "64", "--net", "ethernet-10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "recorded on 2 ranks:" in done.stdout
    assert "5 MiB of gradients" in done.stdout
