"""What all of Horovod's APIs have in common, as one object."""

from choros.comm import registered_process_sets
from choros.parallel import horovod as face

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions that do not depend on a framework; Horovod loads them from the library that the arguments name."""

    Average, Sum, Adasum, Min, Max, Product = face.Average, face.Sum, face.Adasum, face.Min, face.Max, face.Product

    def __init__(self, pkg_path: str, *args: str) -> None:
        """Accepts Horovod's arguments, which name a compiled library: there is none."""

    init = staticmethod(face.init)
    shutdown = staticmethod(face.shutdown)
    is_initialized = staticmethod(face.is_initialized)
    start_timeline = staticmethod(face.start_timeline)
    stop_timeline = staticmethod(face.stop_timeline)
    rank = staticmethod(face.rank)
    size = staticmethod(face.size)
    local_rank = staticmethod(face.local_rank)
    local_size = staticmethod(face.local_size)
    cross_rank = staticmethod(face.cross_rank)
    cross_size = staticmethod(face.cross_size)
    is_homogeneous = staticmethod(face.is_homogeneous)
    mpi_threads_supported = staticmethod(face.mpi_threads_supported)
    mpi_enabled = staticmethod(face.mpi_enabled)
    mpi_built = staticmethod(face.mpi_built)
    gloo_enabled = staticmethod(face.gloo_enabled)
    gloo_built = staticmethod(face.gloo_built)
    nccl_built = staticmethod(face.nccl_built)
    ddl_built = staticmethod(face.ddl_built)
    ccl_built = staticmethod(face.ccl_built)
    cuda_built = staticmethod(face.cuda_built)
    rocm_built = staticmethod(face.rocm_built)

    @staticmethod
    def _get_process_set_ids_and_ranks() -> dict[int, list[int]]:
        """The registered process sets, all ranks among them."""
        return {number: list(process_set.ranks) for number, process_set in registered_process_sets().items()}
