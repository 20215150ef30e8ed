"""Horovod's elastic API for loops of JAX, whose parameters are values: an ``ObjectState`` has them.

::

    state = hvd.elastic.ObjectState(params=params, opt_state=opt_state, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < steps:
            state.params, state.opt_state = step(state.params, state.opt_state)
            state.step += 1
            state.commit()

    train(state)
"""

from choros.elastic.retry import run
from choros.elastic.sampler import ElasticSampler
from choros.elastic.state import ObjectState, State
from choros.errors import HostsUpdatedInterrupt
from choros.parallel.horovod import HorovodInternalError

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "State", "run"]
