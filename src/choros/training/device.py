"""The device of a process: one accelerator, its share of the host's cores, and where it reduces gradients."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import keras

from choros.comm import topology
from choros.comm.devices import Device
from choros.errors import ConfigError
from choros.parallel.reduce.plan import ReduceConfig, bucket_bytes, device_to_reduce_on
from choros.training.keras_internals.models import torch_device


def pin_device(intra_op_threads: int | None = None, inter_op_threads: int | None = None) -> str:
    """Assigns this process the accelerator of its ``local_rank`` and its share of the host's threads.

    Call it once after ``init()``. It sets what Horovod's scripts set themselves: on TensorFlow visible devices, memory
    growth and both thread pools; on PyTorch the current device and both pools; on JAX the visible device. With
    accelerators, call it before the framework computes anything or lists its devices; without them, any time, because
    ``chorosrun`` sets the numbers of threads before Python starts.

    Args:
        intra_op_threads: threads within an operation; ``None`` keeps the launcher's setting, or else the framework's.
        inter_op_threads: concurrent operations; likewise. JAX has no such setting.

    Returns:
        The device, such as ``"gpu:1"`` or ``"cpu"``.

    Raises:
        ConfigError: the framework has started: the device, or the given number of threads, cannot be set any more.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> device = hvd.pin_device()
    """
    local_rank = topology("pin_device()").local_rank
    pin = {"tensorflow": _pin_tensorflow, "torch": _pin_torch, "jax": _pin_jax}[keras.backend.backend()]
    return pin(local_rank, intra_op_threads, inter_op_threads)


def _set_threads(what: str, setter: Callable[[int], None], given: int | None, *variables: str) -> None:
    """Sets a thread pool's size; one that has started has read the launcher's, so only ``given`` is an error then."""
    number = given or _from_environ(*variables)
    if not number:
        return
    try:
        setter(number)
    except RuntimeError as error:
        if given:
            raise _too_late(f"{what}={given}", error) from error


def _too_late(what: str, reason: object) -> ConfigError:
    return ConfigError(
        f"{what} cannot be set, because {keras.backend.backend()} has started already ({reason}): call pin_device() or "
        "create the strategy before the script makes data sets or tensors, or lists devices."
    )


def _from_environ(*names: str) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdigit()), None)


def _pin_tensorflow(local_rank: int, intra: int | None, inter: int | None) -> str:
    import tensorflow as tf

    threads = tf.config.threading
    intra_variables = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    _set_threads("intra_op_threads", threads.set_intra_op_parallelism_threads, intra, *intra_variables)
    _set_threads("inter_op_threads", threads.set_inter_op_parallelism_threads, inter, "TF_NUM_INTEROP_THREADS")
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "cpu"
    index = local_rank % len(gpus)
    try:
        tf.config.set_visible_devices(gpus[index], "GPU")
        tf.config.experimental.set_memory_growth(gpus[index], True)
    except RuntimeError as error:
        raise _too_late(f"the device gpu:{index} of this process", error) from error
    return f"gpu:{index}"


def _pin_torch(local_rank: int, intra: int | None, inter: int | None) -> str:
    import torch

    _set_threads("intra_op_threads", torch.set_num_threads, intra, "TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    if (inter or _from_environ("TF_NUM_INTEROP_THREADS")) != torch.get_num_interop_threads():
        _set_threads("inter_op_threads", torch.set_num_interop_threads, inter, "TF_NUM_INTEROP_THREADS")
    if not torch.cuda.is_available():
        return "cpu"
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"gpu:{index}"


def _pin_jax(local_rank: int, intra: int | None, inter: int | None) -> str:
    del intra, inter  # XLA sizes its pool when it starts, from the launcher's NPROC.
    import jax

    from choros.comm.engines import xla

    if xla.mesh() is not None:  # the engine has assigned this process its devices, maybe several
        device = jax.local_devices()[0]
        return "cpu" if device.platform == "cpu" else f"{device.platform}:{device.local_hardware_id}"
    # Listing JAX's devices would initialise all of them, so the visible ones are restricted first. A scheduler may
    # have assigned this process fewer devices than the host has.
    visible = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    index = local_rank % len(visible) if visible else local_rank
    jax.config.update("jax_cuda_visible_devices", str(index))
    jax.config.update("jax_rocm_visible_devices", str(index))
    devices = jax.local_devices()
    if len(devices) > 1 and devices[0].platform == "gpu":
        raise _too_late(f"the device gpu:{index} of this process", f"it uses {len(devices)} GPUs")
    return "cpu" if devices[0].platform == "cpu" else f"{devices[0].platform}:{index}"


def accelerated() -> bool:
    """Whether the framework computes on an accelerator, not on the CPU."""
    match keras.backend.backend():
        case "tensorflow":
            return tensorflow_gpu() is not None
        case "torch":
            import torch

            return bool(torch.cuda.is_available())
        case _:
            import jax

            return bool(jax.default_backend() != "cpu")


def tensorflow_gpu() -> int | None:
    """The number of the GPU on which TensorFlow computes; ``None`` if it computes on the CPU."""
    import tensorflow as tf

    gpus = tf.config.get_visible_devices("GPU")
    return int(gpus[0].name.rpartition(":")[2]) if gpus else None


def placed(config: ReduceConfig) -> ReduceConfig:
    """Returns ``config`` with the device and the bucket size that suit the framework and its device."""
    backend, device = keras.backend.backend(), None  # on JAX through host memory
    if backend != "jax" and config.process_set.included():
        own: Any
        if backend == "torch":
            import torch

            own = torch.empty(0, device=torch_device()).device
        else:
            gpu = tensorflow_gpu()
            own = Device("cpu") if gpu is None else Device("cuda", gpu)
        device = device_to_reduce_on(config.process_set.communicator, config.compressor, backend, [own])
    buckets = bucket_bytes(accelerated=accelerated(), device=device) if config.micro_batches == 1 else None
    return dataclasses.replace(config, device=device, bucket_bytes=buckets)
