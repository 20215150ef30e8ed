"""``horovod.run``: a function on the ranks of a new job."""

from choros.launch.run import run

__all__ = ["run"]
