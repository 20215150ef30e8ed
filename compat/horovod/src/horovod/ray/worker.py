"""The class of Ray's actors that hold a rank's resources."""

from choros.ray import RayWorker as BaseHorovodWorker

__all__ = ["BaseHorovodWorker"]
