"""The engine for JAX on accelerators: XLA reduces device arrays in the compiled step, over one mesh; MPI, or
``local``, moves host arrays. ``jax.distributed`` starts once, before JAX's devices; a second ``init()`` finds it
running. Its own ways to abort a process are disabled: chorosrun watches the processes::

    rank 0                                   rank 1
    mpi.start                                mpi.start
    own address        ── broadcast ───────► address                   host collectives are MPI's from here on
    jax.distributed.initialize ◄── gRPC ───► jax.distributed.initialize
    mesh: gpu 0, gpu 1, gpu 2, gpu 3         the same                  NCCL, Gloo or the TPUs' links move the arrays
"""

import atexit
import ctypes
import functools
import os
import socket
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from choros import durations
from choros.comm.communicator import Communicator, bytes_of_first
from choros.comm.engines.local import LocalCommunicator
from choros.comm.request import Request
from choros.errors import ConfigError, EngineError, EngineUnavailable
from choros.topology import Master, Topology
from choros.transport.address import LOOPBACK, outward_address

#: The first version that can run without its preemption service.
_OLDEST_JAX = (0, 8, 0)
#: The name of the mesh's only axis, along which examples are sharded.
BATCH_AXIS = "batch"
_OPTIONS = {
    # Ranks are stopped with SIGTERM, which JAX would treat as a notice to save and continue.
    "jax_enable_preemption_service": False,
    # Otherwise a process aborts as soon as another has died, and it is no longer clear which one was the first.
    "jax_enable_recoverability": True,
    "jax_cpu_collectives_implementation": "gloo",
}

_mesh: jax.sharding.Mesh | None = None
#: The ranks that MPI has joined, for when they leave.
_farewell: Communicator | None = None


def start(topology: Topology, comm: Any = None) -> tuple[Communicator, Topology]:
    """Joins the processes' devices in one mesh, before JAX looks for any; returns the communicator for host arrays and
    this rank's position. A process alone needs no MPI. Of several on one host each takes the accelerator of its
    ``local_rank``, unless ``JAX_LOCAL_DEVICE_IDS`` lists others.
    """
    global _farewell, _mesh
    if jax.__version_info__ < _OLDEST_JAX:
        raise EngineUnavailable(
            f"the xla engine needs JAX {'.'.join(map(str, _OLDEST_JAX))} or later, and this is {jax.__version__}: pip "
            "install -U jax."
        )
    if topology.size == 1 and comm in (None, [0]):
        communicator: Communicator = LocalCommunicator()
        position = topology
    else:
        from choros.comm.engines import mpi

        communicator, position = mpi.start(topology, comm)
        if communicator.size > 1:
            _join(communicator, position)
        _farewell = _farewell or communicator.split(range(communicator.size))
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    _mesh = jax.sharding.Mesh(np.array(devices), (BATCH_AXIS,))
    return communicator, position


def mesh() -> jax.sharding.Mesh | None:
    """All devices by rank; ``None`` without this engine, in which the compiled step reduces the gradients."""
    return _mesh


def finalize() -> None:
    """Leaves ``jax.distributed``, then MPI, with the process; rank 0 is last, as it holds the others together."""
    if _farewell is None:
        return
    if _farewell.rank == 0:
        _farewell.barrier()
    from jax._src import api

    api.clean_up()  # releases devices before jax.distributed.shutdown()
    if _farewell.rank != 0:
        _farewell.barrier()
    _farewell.close()
    from choros.comm.engines import mpi

    mpi.finalize()


def _join(communicator: Communicator, position: Topology) -> None:
    """Initialises ``jax.distributed`` on all ranks, or raises on all of them."""
    joined = jax.distributed.is_initialized()
    problem = _problem(communicator, joined=joined)
    communicator.agree(Request("start of jax.distributed", f"running={joined}"), problem=problem)
    if joined:
        return
    listening = functools.partial(_free_address, position)
    address = bytes_of_first(communicator, listening, "the start of jax.distributed").decode()
    for option, value in _OPTIONS.items():
        jax.config.update(option, value)
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            # JAX would listen at all addresses.
            coordinator_bind_address=address if address.startswith(f"{LOOPBACK}:") else None,
            num_processes=communicator.size,
            process_id=communicator.rank,
            local_device_ids=_local_devices(position, os.environ),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=int(durations.XLA_HEARTBEAT),
            shutdown_timeout_seconds=int(durations.XLA_SHUTDOWN),
        )
    except RuntimeError as error:
        raise EngineError(
            f"rank {communicator.rank} could not join the others at {address}: {error}. If that is no address of rank "
            "0's host, set JAX_COORDINATOR_ADDRESS=host:port."
        ) from error
    # A rank that dies must not disconnect in order: it would wait for others, and rank 0 would kill them.
    from jax._src import api, distributed

    atexit.unregister(api.clean_up)
    for part in (distributed.global_state.client, distributed.global_state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # never destroyed, which would disconnect too


def _problem(communicator: Communicator, *, joined: bool) -> ConfigError | None:
    from jax._src.xla_bridge import backends_are_initialized

    if not joined and backends_are_initialized():
        return ConfigError(
            "JAX has looked for devices before init() could join it with the other processes: call init() first, "
            "before anything that makes an array or a model."
        )
    if joined and (jax.process_index(), jax.process_count()) != (communicator.rank, communicator.size):
        return ConfigError(
            f"rank {communicator.rank} of {communicator.size} is process {jax.process_index()} of "
            f"{jax.process_count()} in jax.distributed, which was initialised before: leave that to init(), and give "
            "it the same ranks whenever it is called."
        )
    return None


def _free_address(position: Topology) -> bytes:
    """The address at which rank 0 is to listen: ``JAX_COORDINATOR_ADDRESS`` if it is set there, else a free port."""
    host = LOOPBACK if position.local_size == position.size else outward_address()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return (os.environ.get("JAX_COORDINATOR_ADDRESS") or str(Master(host, probe.getsockname()[1]))).encode()


def _local_devices(position: Topology, environ: Mapping[str, str]) -> list[int] | None:
    """The accelerators this process uses; ``None`` for all visible ones, or those that JAX's variable lists."""
    if position.local_size == 1 or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return [position.local_rank % len(visible.split(",")) if visible else position.local_rank]
