"""The device of a process: one accelerator, and its share of the host's cores."""

from __future__ import annotations

import os

import keras

from choros.comm import topology

__all__ = ["accelerated", "pin_device", "spare_xla_thread"]

#: One thread for a callback, one for its arguments.
_XLA_THREADS = 2


def pin_device(intra_op_threads: int | None = None, inter_op_threads: int | None = None) -> str:
    """Assigns this process the accelerator of its ``local_rank`` and its share of the host's threads.

    Call it once after ``init()``, before the framework computes anything. It sets what Horovod's scripts set
    themselves: on TensorFlow visible devices, memory growth and both thread pools; on PyTorch the current
    device and both pools; on JAX the visible device.

    Args:
        intra_op_threads: threads within an operation; ``None`` keeps the launcher's setting, or else the framework's.
        inter_op_threads: concurrent operations; likewise. JAX has no such setting.

    Returns:
        The device, such as ``"gpu:1"`` or ``"cpu"``.

    Example:
        >>> import choros.keras as hvd
        >>> hvd.init()
        >>> device = hvd.pin_device()
    """
    local_rank = topology("pin_device()").local_rank
    pin = {"tensorflow": _pin_tensorflow, "torch": _pin_torch, "jax": _pin_jax}[keras.backend.backend()]
    intra = intra_op_threads or _from_environ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    inter = inter_op_threads or _from_environ("TF_NUM_INTEROP_THREADS")
    return pin(local_rank, intra, inter)


def _from_environ(*names: str) -> int | None:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdigit()), None)


def _pin_tensorflow(local_rank: int, intra: int | None, inter: int | None) -> str:
    import tensorflow as tf

    if intra:
        tf.config.threading.set_intra_op_parallelism_threads(intra)
    if inter:
        tf.config.threading.set_inter_op_parallelism_threads(inter)
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "cpu"
    index = local_rank % len(gpus)
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    return f"gpu:{index}"


def _pin_torch(local_rank: int, intra: int | None, inter: int | None) -> str:
    import torch

    if intra:
        torch.set_num_threads(intra)
    if inter and torch.get_num_interop_threads() != inter:
        torch.set_num_interop_threads(inter)
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
    device = jax.local_devices()[0]
    return "cpu" if device.platform == "cpu" else f"{device.platform}:{index}"


def accelerated() -> bool:
    """Whether the framework computes on an accelerator, not on the CPU."""
    match keras.backend.backend():
        case "tensorflow":
            import tensorflow as tf

            return bool(tf.config.list_physical_devices("GPU"))
        case "torch":
            import torch

            return bool(torch.cuda.is_available())
        case _:
            import jax

            return bool(jax.default_backend() != "cpu")


def spare_xla_thread() -> None:
    """Prevents a deadlock of JAX steps that wait for other ranks in a callback (jax-ml/jax#25861).

    The callback holds one thread of XLA's pool, and another thread copies its arguments: with one core, and so one
    thread, a step on large arrays would wait for itself. Must be called before JAX computes anything.
    """
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("NPROC", "")
    if (int(threads) if threads.isdigit() else cores) < _XLA_THREADS:
        os.environ["NPROC"] = str(_XLA_THREADS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
