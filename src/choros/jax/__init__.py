"""Horovod's programming model for JAX: collectives, and an optax transformation that reduces gradients.

::

    import choros.jax as hvd

    hvd.init()
    tx = hvd.distributed(optax.adam(0.001 * hvd.size()))
    params = hvd.broadcast_parameters(params)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(gradients, state, params, examples=len(x))
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss)
"""

try:
    import jax as _jax  # noqa: F401  (reports missing JAX before any other import fails)
except ImportError as _error:
    raise ImportError("choros.jax needs JAX: pip install 'choros[jax]'.") from _error

from choros.arrays.jax_arrays import spare_xla_thread as _spare_xla_thread
from choros.jax import collectives as _collectives
from choros.jax import elastic
from choros.jax.optimizer import distributed, join
from choros.jax.sliced_state import clip_by_global_norm, own_state, whole_state
from choros.parallel import horovod as _horovod
from choros.parallel.horovod import *

# isort: split
from choros.jax.collectives import *  # three of them in place of those of all faces

_spare_xla_thread()

__all__ = ["clip_by_global_norm", "distributed", "elastic", "join", "own_state", "whole_state"]
__all__ += _collectives.__all__
__all__ += [name for name in _horovod.__all__ if name not in _collectives.__all__]
