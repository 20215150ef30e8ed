"""What ranks give the callbacks of ``run``."""

from choros.ray.rank import configure, log

__all__ = ["configure", "log"]
