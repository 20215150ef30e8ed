"""What ranks give the callbacks of ``run``."""

from choros.ray.ray_logger import configure, log

__all__ = ["configure", "log"]
