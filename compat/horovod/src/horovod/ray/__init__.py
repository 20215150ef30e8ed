"""``horovod.ray``: choros' ``RayExecutor`` (``pip install "choros[ray]"``)."""

from choros.ray import ElasticRayExecutor, RayExecutor
from choros.ray import RayWorker as BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
