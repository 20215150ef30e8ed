"""Joining the job: how a strategy initialises its process."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np

from choros.comm import init, is_initialized, topology
from choros.distribute.cluster_resolver import tf_config_of
from choros.errors import ConfigError
from choros.frameworks import FRAMEWORKS, missing_backend
from choros.parallel.objects import object_of_first
from choros.topology import TF_CONFIG, Topology
from choros.topology.environments import RANK_LAUNCHERS

__all__ = ["framework", "join"]


def framework() -> str:
    """Returns the framework that trains: Keras' backend; without Keras, the framework that the program has imported.

    If no framework is imported and Keras is installed, it is imported, so that models created in a scope are patched.

    Raises:
        ConfigError: no framework is imported, or Keras' backend cannot train.
    """
    loaded = [name for name in FRAMEWORKS if sys.modules.get(name) is not None]
    if "keras" in sys.modules or (not loaded and importlib.util.find_spec("keras") is not None):
        try:
            import keras
        except ImportError as error:
            raise ConfigError(missing_backend(error)) from None
        backend = str(keras.backend.backend())
        if backend not in FRAMEWORKS:
            raise ConfigError(
                f"Keras' backend is {backend}, which cannot train: set KERAS_BACKEND to {' or '.join(FRAMEWORKS)}."
            )
        return backend
    if loaded:
        return loaded[0]
    raise ConfigError(
        "a strategy needs a framework to train with: import torch, jax or tensorflow first, or install "
        "Keras: pip install 'choros[tensorflow]', 'choros[torch]' or 'choros[jax]'."
    )


def join(cluster_resolver: Any = None) -> Topology:
    """Joins the job in which this process was started; pins its device, and sets a common seed for ``tf.data``.

    A ``shuffle`` without a seed draws one from TensorFlow's global seed. All processes receive the same global seed,
    unless the program has set one already.

    Args:
        cluster_resolver: provides the processes' addresses, if no launcher has started the ranks.

    Returns:
        The job, and this process's rank in it.

    Raises:
        ConfigError: there is no framework to train with, or it has started already on accelerators, so that the device
            of this process can no longer be set.
    """
    if cluster_resolver is not None and not is_initialized() and not _is_rank_of_launcher():
        os.environ[TF_CONFIG] = tf_config_of(cluster_resolver)
    init()
    job = topology()
    framework()
    if job.size == 1:
        return job
    if "keras" in sys.modules:
        from choros.training.device import pin_device

        pin_device()
    seed = object_of_first(lambda: int(np.random.randint(2**31)))
    if sys.modules.get("tensorflow") is not None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        if context.global_seed() is None:
            tf.random.set_seed(seed)
    return job


def _is_rank_of_launcher() -> bool:
    return any(environment.read(os.environ) is not None for environment in RANK_LAUNCHERS)
