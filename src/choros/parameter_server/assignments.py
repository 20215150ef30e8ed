"""What functions on workers assign to the weights of models themselves, besides what optimizers do with them.

::

    function                        assign              agreed, with the servers
      teacher.assign(mean)            noted ───────────► the value before
    at its end                                           differs: the servers get the value, the last writer wins

A function that is compiled assigns without ``assign``, whenever it runs: what it was seen to assign when it was traced
is compared after each function, as are the statistics of layers; nothing else is.
"""

import weakref
from typing import Any

import numpy as np

from choros.arrays import adapter_of
from choros.comm import Array
from choros.training.keras_internals.models import in_stateless_scope, local_value
from choros.training.replaced import derived
from choros.training.thread import thread

_SESSION = "_choros_session"


def note_assignments(variable: Any, session: Any) -> None:
    """Makes ``assign`` of a worker's variable call ``session.note`` first."""
    variable.__class__ = derived(type(variable), _Noted)
    # Not the session itself, which a copy of the variable would copy.
    object.__setattr__(variable, _SESSION, weakref.ref(session))


class _Noted:
    """The method of a variable that notes what a function assigns."""

    def assign(self, value: Any) -> Any:
        """Keras' own."""
        session = getattr(self, _SESSION)()
        if session is not None and not thread.receiving_values:
            is_compiled = in_stateless_scope() or adapter_of(local_value(self)).is_symbolic([value])
            session.note(self, compiled=is_compiled)
        return super().assign(value)  # type: ignore[misc]


def copy_of(variable: Any) -> Array | None:
    """Returns a copy of a variable's value, also while a function is traced; ``None`` if JAX has given it away."""
    import keras

    value = local_value(variable)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.init_scope():
            return np.array(adapter_of(value).to_host(value))
    if keras.backend.backend() == "jax" and value.is_deleted():
        return None
    return np.array(adapter_of(value).to_host(value))
