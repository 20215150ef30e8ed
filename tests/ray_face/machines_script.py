"""The driver of jobs on several machines: ``machines_script.py ADDRESS DIRECTORY``; prints what their ranks return."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import ray

from choros.ray import RayExecutor
from ray_face.training import count_rows


def where():
    """Says where a rank runs."""
    import choros
    from choros.parallel.objects import allgather_object

    choros.init()
    print("rank", choros.rank(), "on", os.uname().nodename, flush=True)
    return choros.rank(), choros.size(), choros.local_size(), choros.cross_size(), allgather_object(os.uname().nodename)


def main(address: str, directory: Path) -> None:
    """Runs the jobs."""
    ray.init(address=f"{address}:6379", _node_ip_address=address)
    job = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_hosts=2)
    job.start()
    print(json.dumps({"where": [job.run(where), job.run(where)]}), flush=True)
    job.shutdown()
    env = {"KERAS_BACKEND": "torch", "CHOROS_COMMIT_DIR": str(directory / "commits"), "CHOROS_COMMIT_STEPS": "1"}
    job = RayExecutor(RayExecutor.create_settings(timeout_s=60), min_workers=1, max_workers=5, env_vars=env)
    job.start()
    print(json.dumps({"trained": job.run(count_rows, args=[6, str(directory), 2])}), flush=True)
    job.shutdown()
    job = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
    job.start()
    job.run(sleep, args=[str(directory / "asleep")])


def sleep(file):
    """Does not end."""
    import time

    import choros

    choros.init()
    Path(f"{file}{choros.rank()}").touch()
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
