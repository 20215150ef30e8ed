"""Runs jobs on two machines: ``machines_script.py DIRECTORY``; prints what their ranks return."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest

import choros.spark
from spark_face.machines import machines
from spark_face.training import TORCH, fit


def where():
    """Says where a rank runs."""
    import choros
    from choros.parallel.objects import allgather_object

    choros.init()
    print("rank", choros.rank(), "on", os.uname().nodename, flush=True)
    return choros.rank(), choros.size(), choros.local_size(), choros.cross_size(), allgather_object(os.uname().nodename)


def read(rows):
    """The sum of a column, and the file in which this machine has it."""
    import choros

    choros.init()
    (values,) = rows.arrays("value")
    return float(values.sum()), str(values.filename)


def main(directory: Path) -> None:
    """Runs the jobs."""
    progress = directory / "progress"

    def kill():
        while not progress.exists() or len(progress.read_text().splitlines()) < 12:
            time.sleep(0.05)
        starting = spark.starting_executor()
        next(each for each in spark.executors() if each != starting).kill()

    with machines(directory) as spark:
        found = choros.spark.run(where, num_proc=2, start_timeout=60)
        df = spark.session.createDataFrame([(float(value),) for value in range(100)], ["value"])
        rows = choros.spark.run(read, (choros.spark.write_parquet(df, directory / "rows"),), num_proc=2)
        expected = choros.spark.run(fit, num_proc=2, env=TORCH)
        threading.Thread(target=kill).start()
        commits = {"commit_dir": str(directory / "commits"), "commit_steps": 1}
        again = choros.spark.run_elastic(fit, (str(progress), 0.1), num_proc=2, env=TORCH, **commits)
        left = len(spark.ranks())
    pairs = zip(again[0][0], expected[0][0], strict=True)
    difference = max(float(np.abs(np.subtract(own, other)).max()) for own, other in pairs)
    kept = [file for _, file in rows if os.path.exists(os.path.dirname(os.path.dirname(file)))]
    print(
        json.dumps(
            {"rows": rows, "kept": kept, "where": found, "steps": again[0][1], "difference": difference, "left": left}
        )
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except pytest.skip.Exception as error:
        print("skipped:", error)
