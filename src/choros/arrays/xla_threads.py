"""The threads with which XLA runs JAX's compiled functions on a CPU."""

from __future__ import annotations

import os

__all__ = ["spare_xla_thread"]

#: One thread for a callback, one for its arguments.
_THREADS = 2


def spare_xla_thread() -> None:
    """Prevents a deadlock of compiled functions of JAX that wait for other ranks in a callback (jax-ml/jax#25861).

    The callback holds one thread of XLA's pool, and another thread copies its arguments: with one core, and so one
    thread, a step on large arrays would wait for itself. Must be called before JAX computes anything.
    """
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("NPROC", "")
    if (int(threads) if threads.isdigit() else cores) < _THREADS:
        os.environ["NPROC"] = str(_THREADS)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
