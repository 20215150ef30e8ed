"""A rank that may allocate BYTES a parameter besides what the process has, and trains; run by test_memory.py.

Usage: limited_rank.py PARAMETERS SHARD_STATE BYTES
"""

import resource
import sys
from pathlib import Path

import choros.keras as hvd
from choros.bench.memory import train, width_of

LAYERS = 8


def private_bytes() -> int:
    """What RLIMIT_DATA limits: private memory that may be written to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def main(parameters: int, shard_state: bool, each: float) -> None:
    hvd.init()
    hvd.pin_device()
    train(2, 4, shard_state)
    limit = private_bytes() + int(parameters * each)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    train(LAYERS, width_of(parameters, LAYERS), shard_state)
    print("trained")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "True", float(sys.argv[3]))
