"""The record of a job: of the ranks over time, and what --report writes."""

import json
import os
import subprocess
import sys

import pytest

from choros.launch.driver import job_record
from choros.launch.driver.job_record import JobRecord, RankRecord
from choros.launch.protocol.frames import Start
from choros.observe.progress import SERIES, RankProgress
from launch.launched import rank_script, run


def test_moments_are_as_far_apart_as_memory_allows():
    rank = RankRecord()
    for second in range(5000):
        rank.moments.note(RankProgress(0, steps=second), float(second))
    written = rank.to_json()
    assert len(written["times"]) <= job_record._MOST
    assert written["times"][0] == 0
    assert written["times"][-1] >= 4990
    assert written["steps"] == [int(each) for each in written["times"]]
    assert written["steps"][-1] == 4999
    assert {len(written[name]) for name in SERIES} == {len(written["times"])}


def test_a_record_has_no_variables_of_the_user():
    record = JobRecord(["train"], 2, {"CHOROS_OVERLAP": "1", "HF_TOKEN": "secret", "CHOROS_SECRET": "a secret key"})
    record.start(Start(1, "b", 7))
    record.note(RankProgress(1, steps=30, seconds=12.0, examples=60.0))
    record.show("chorosrun: rank 0 was killed.")
    record.end(0)
    written = record.to_json()
    assert written["settings"] == {"CHOROS_OVERLAP": "1"}
    assert "secret" not in json.dumps(written)
    assert (written["ranks"]["1"]["host"], written["ranks"]["1"]["pid"]) == ("b", 7)
    assert written["lines"][0].startswith("30 steps, 2.5 steps/s, 5 examples/s; ")
    assert written["messages"][0][1] == "chorosrun: rank 0 was killed."


STEPS = """
import choros, time
from choros.observe.progress import page
choros.init()
for _ in range(5):
    choros.comm.global_process_set.communicator.barrier()
    page.note_step(8)
time.sleep(1.2)  # until the next report
if rank == 1: sys.exit(3)
"""


@pytest.mark.slow
def test_a_job_that_fails_has_a_report(tmp_path):
    script = rank_script(tmp_path / "script.py", STEPS)
    ended = run("-np", 2, "--report", tmp_path / "run.html", "--env", "CHOROS_OVERLAP=1", sys.executable, script)
    assert ended.code == 3, ended.err
    written = json.loads((tmp_path / "run.json").read_text())
    assert (written["size"], written["code"], written["settings"]) == (2, 3, {"CHOROS_OVERLAP": "1"})
    assert [rank["steps"][-1] for rank in written["ranks"].values()] == [4, 4]
    assert [rank["examples"][-1] for rank in written["ranks"].values()] == [32, 32]
    assert all(sum(rank["histogram"]) == 4 and max(rank["memory"]) > 1e6 for rank in written["ranks"].values())
    assert all(rank["collectives"]["barrier"] == [5, 0] for rank in written["ranks"].values())
    assert "on 2 ranks;" in (tmp_path / "run.html").read_text()


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_no_failure(tmp_path):
    script = rank_script(tmp_path / "script.py", "import choros; choros.init()")
    ended = run("-np", 1, "--report", "/proc/none/run.html", sys.executable, script)
    assert ended.code == 0
    assert "the report /proc/none/run.html cannot be written: " in ended.err


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a file system")
def test_a_full_disk_is_no_failure(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", full], check=True, timeout=60)
    try:
        (full / "filled").write_bytes(bytes(4096))
        script = rank_script(tmp_path / "script.py", "import choros; choros.init(); print('trained')")
        ended = run("-np", 1, "--report", full / "run.html", sys.executable, script)
        assert (ended.code, [each.name for each in full.iterdir()]) == (0, ["filled"])
    finally:
        subprocess.run(["umount", full], check=True, timeout=60)
    assert "trained" in ended.out
    assert "run.html cannot be written: [Errno 28] No space left on device" in ended.err
