"""Records of jobs that were not run."""

from __future__ import annotations

import json
from pathlib import Path

from choros.launch.driver.job_record import JobRecord, RankRecord
from choros.observe.progress import BUCKETS, RankProgress, bucket_of
from choros.report.page import WrittenRecord

BEGAN = 1_700_000_000.0


def record_of(ranks: int, *, seconds: int = 60, steps: bool = True, step: float = 0.1) -> JobRecord:
    """A job of ``ranks``, which wait for rank 1; of steps that take ``step`` seconds."""
    record = JobRecord(["python", "train.py", "--name", "<b>&"], ranks, {"CHOROS_OVERLAP": "1"}, began=BEGAN)
    for number in range(ranks):
        record.ranks[number] = rank = RankRecord(f"host-{number // 8}", 1000 + number)
        for second in range(1, seconds):
            rank.moments.note(progress(number, int(second / step) if steps else 0, step), BEGAN + second)
    record.messages = [(BEGAN + 20.5, "chorosrun: rank 3 was killed.\nThe others go on."), (BEGAN + 40, "<i>back</i>")]
    record.ended, record.code = BEGAN + seconds, 0
    return record


def progress(number: int, made: int, step: float = 0.1) -> RankProgress:
    """What a rank has done in so many steps."""
    took, slow = step * made, number == 1
    histogram = [0] * BUCKETS
    histogram[bucket_of(step)] = made
    return RankProgress(
        number, made, made if slow else made // 20, took, waiting=0.0 if slow else 0.4 * took, loading=0.1 * took,
        exchanging=0.05 * took, committing=0.02 * took, pausing=1.0 if made else 0.0, examples=32.0 * made,
        began=BEGAN + 2 if made else 0.0, last="allreduce(name='loss')", memory=int(4e8 + 1e6 * made + 1e7 * number),
        histogram=histogram if made else (), collectives={"gradients": (made, 1000 * made), "barrier": (1, 0)},
    )  # fmt: skip


def read(record: JobRecord) -> WrittenRecord:
    """As the page reads it."""
    return WrittenRecord.of(json.loads(json.dumps(record.to_json())))


def written(file: Path, record: JobRecord) -> Path:
    """A file with the record."""
    file.write_text(json.dumps(record.to_json()))
    return file
