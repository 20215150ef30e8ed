"""What ranks can do together, and joining and leaving the job."""

from choros.comm.communicator import Communicator
from choros.comm.context import (
    add_process_set,
    admit,
    init,
    is_initialized,
    leave_alone,
    on_change,
    opening,
    openings,
    raising_losses,
    registered_process_sets,
    remove_process_set,
    shutdown,
    topology,
)
from choros.comm.members import END, LEAVES, NEWCOMER
from choros.comm.process_set import ProcessSet, global_process_set, has_others
from choros.comm.reduction import BFLOAT16, Array, DType, Reduction
from choros.comm.request import Request
from choros.comm.work import Work
