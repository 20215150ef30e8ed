"""How a strategy's process joins its job."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np

from choros.comm import init, is_initialized, topology
from choros.distribute.cluster_resolver import tf_config_of
from choros.errors import ConfigError
from choros.parallel.objects import broadcast_object
from choros.topology import TF_CONFIG, Topology
from choros.topology.environments import RANK_LAUNCHERS

__all__ = ["framework", "join"]

_FRAMEWORKS = ("tensorflow", "torch", "jax")


def framework() -> str:
    """The framework that trains: Keras' backend; without Keras, what the program has imported.

    Keras is imported if it is installed and nothing else tells, so that models made in a scope are caught.

    Raises:
        ConfigError: there is none.
    """
    loaded = [name for name in _FRAMEWORKS if sys.modules.get(name) is not None]
    if "keras" in sys.modules or (not loaded and importlib.util.find_spec("keras") is not None):
        import keras

        backend = str(keras.backend.backend())
        if backend not in _FRAMEWORKS:
            raise ConfigError(
                f"Keras' backend is {backend}, which does not train: set KERAS_BACKEND to {' or '.join(_FRAMEWORKS)}."
            )
        return backend
    if loaded:
        return loaded[0]
    raise ConfigError(
        "a strategy needs a framework to train with: import torch, jax or tensorflow before it is made, or install "
        "Keras: pip install 'choros[tensorflow]', 'choros[torch]' or 'choros[jax]'."
    )


def join(cluster_resolver: Any = None) -> Topology:
    """Joins the job that this process was started in; gives it its device, and data in an order that all share.

    ``tf.data`` draws the seeds of a ``shuffle`` that was given none from TensorFlow's global seed: all processes get
    one, unless the program has set it already.

    Args:
        cluster_resolver: tells the workers' addresses, if no launcher that starts ranks has.

    Returns:
        The place of this process.
    """
    if cluster_resolver is not None and not is_initialized() and not _is_rank_of_launcher():
        os.environ[TF_CONFIG] = tf_config_of(cluster_resolver)
    init()
    place = topology()
    used = framework()
    if place.size == 1:
        return place
    if "keras" in sys.modules:
        from choros.training.device import pin_device

        try:
            pin_device()
        except RuntimeError as error:
            raise ConfigError(
                f"the strategy gives this process its device and threads, which {used} no longer lets it do ({error}): "
                "make the strategy first, before anything is computed."
            ) from error
    seed = broadcast_object(int(np.random.randint(2**31)))
    if sys.modules.get("tensorflow") is not None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        if context.global_seed() is None:
            tf.random.set_seed(seed)
    return place


def _is_rank_of_launcher() -> bool:
    return any(environment.read(os.environ) is not None for environment in RANK_LAUNCHERS)
