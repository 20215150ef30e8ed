"""Ranks that name the processes of their job, and make steps until a file exists."""

import os
import sys
import time
from pathlib import Path

import psutil

import choros
from choros.elastic.preemption import end_job, job_ends, leave_if_asked, watch_signals
from choros.parallel.objects import allgather_object

choros.init()
watch_signals(lambda: True)
rank, wrapper, mpirun, _ = psutil.Process(), *psutil.Process().parents()[:3]
allgather_object(None)  # all ranks have left init(), and watch signals
if choros.rank() == 1:
    pids = f"rank={rank.pid} wrapper={wrapper.pid} mpirun={mpirun.pid} job={os.environ['CHOROS_JOB']}"
    print(f"processes {pids}", flush=True)
while not all(allgather_object(Path(sys.argv[1]).exists())):
    if job_ends():
        end_job(lambda: None)
    leave_if_asked()
    time.sleep(0.01)
print(f"finished of {choros.size()}", flush=True)
