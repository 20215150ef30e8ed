"""horovodrun's flags that chorosrun does not support: for each, the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["UNSUPPORTED", "unsupported_flag_reason"]

_ELASTIC = "elastic jobs are not yet in this release. Run with a fixed -np, and save checkpoints."
_TUNING = "choros has no cycle time: a collective starts when it is called. Leave it out."
_AUTOTUNE = (
    "set CHOROS_AUTOTUNE=1 in the environment instead: ranks then measure the best message sizes when they start."
)
_ALGORITHM = "choros chooses the algorithm by the size of the message and the hosts of the ranks; leave it out."
_TIMELINE = "timelines are not yet in this release. Use your framework's profiler, such as keras' TensorBoard callback."
_STALL = "the stall check is not yet in this release. Use --timeout to end a job that hangs."
_YAML = "configuration files are not supported. Write the flags on the command line, or in a shell script."
_LOGGING = (
    "chorosrun's own messages are few and have no timestamps. Use --verbose to show mpirun's messages, and "
    "--output-dir to write the ranks' output to files."
)

UNSUPPORTED: dict[str, str] = {
    "--disable-cache": "chorosrun checks the hosts at every start and caches nothing; leave it out.",
    "--config-file": _YAML,
    "--fusion-threshold-mb": "choros sizes its fusion buffers itself; CHOROS_AUTOTUNE=1 measures the best size.",
    "--cycle-time-ms": _TUNING,
    "--cache-capacity": "choros has no response cache; leave it out.",
    "--hierarchical-allreduce": _ALGORITHM,
    "--no-hierarchical-allreduce": _ALGORITHM,
    "--hierarchical-allgather": _ALGORITHM,
    "--no-hierarchical-allgather": _ALGORITHM,
    "--torus-allreduce": _ALGORITHM,
    "--no-torus-allreduce": _ALGORITHM,
    "--autotune": _AUTOTUNE,
    "--no-autotune": _AUTOTUNE,
    "--autotune-log-file": _AUTOTUNE,
    "--autotune-warmup-samples": _AUTOTUNE,
    "--autotune-steps-per-sample": _AUTOTUNE,
    "--autotune-bayes-opt-max-samples": _AUTOTUNE,
    "--autotune-gaussian-process-noise": _AUTOTUNE,
    "--min-np": _ELASTIC,
    "--min-num-proc": _ELASTIC,
    "--max-np": _ELASTIC,
    "--max-num-proc": _ELASTIC,
    "--slots-per-host": _ELASTIC,
    "--elastic-timeout": _ELASTIC,
    "--reset-limit": _ELASTIC,
    "--blacklist-cooldown-range": _ELASTIC,
    "--host-discovery-script": _ELASTIC,
    "--timeline-filename": _TIMELINE,
    "--timeline-mark-cycles": _TIMELINE,
    "--no-timeline-mark-cycles": _TIMELINE,
    "--no-stall-check": _STALL,
    "--stall-check": _STALL,
    "--stall-check-warning-time-seconds": _STALL,
    "--stall-check-shutdown-time-seconds": _STALL,
    "--mpi-threads-disable": "choros never calls MPI from several threads at once; leave it out.",
    "--no-mpi-threads-disable": "choros never calls MPI from several threads at once; leave it out.",
    "--num-nccl-streams": "choros does not manage NCCL's streams itself; leave it out.",
    "--thread-affinity": "each rank is bound to its own cores; --binding-args leaves binding to mpirun.",
    "--gloo-timeout-seconds": "--start-timeout limits how long ranks may take to start; leave it out.",
    "--log-with-timestamp": _LOGGING,
    "--log-without-timestamp": _LOGGING,
    "-prefix-timestamp": _LOGGING,
    "--prefix-output-with-timestamp": _LOGGING,
    "--log-hide-timestamp": _LOGGING,
    "--no-log-hide-timestamp": _LOGGING,
    "--gloo": "the engine is MPI. Leave it out; with CHOROS_ENGINE=torch, ranks communicate through Gloo.",
    "--jsrun": "jsrun is not supported; chorosrun's mpirun runs inside an LSF allocation by itself. Leave it out.",
}  # fmt: skip


def unsupported_flag_reason(argv: Sequence[str], flags_with_value: frozenset[str]) -> str | None:
    """Returns the message about the first unsupported flag in ``argv``; ``None`` if there is none.

    Only flags before the command count; the command begins at the first argument that is neither a flag nor a flag's
    value.

    Args:
        argv: chorosrun's arguments.
        flags_with_value: chorosrun's own flags that take a value.

    Example:
        >>> unsupported_flag_reason(["-np", "2", "--gloo", "python"], frozenset({"-np"}))
        '--gloo: the engine is MPI. Leave it out; with CHOROS_ENGINE=torch, ranks communicate through Gloo.'
        >>> unsupported_flag_reason(["-np", "2", "python", "--gloo"], frozenset({"-np"})) is None
        True
    """
    position = 0
    while position < len(argv):
        flag, equals, _ = argv[position].partition("=")
        if flag in UNSUPPORTED:
            return f"{flag}: {UNSUPPORTED[flag]}"
        if flag == "--" or not flag.startswith("-"):
            return None
        position += 2 if flag in flags_with_value and not equals else 1
    return None
