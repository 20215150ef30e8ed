"""What each thread does at present: what its functions must do, or leave out, meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class _Thread(threading.local):
    amending: Callable[[Path], None] | None = None  # each file that Keras writes, before it is complete
    applying_optimizer = False  # which may contain other optimizers
    applying_updates = False  # of a distributed optimizer: all ranks make the same
    building_slices = False  # creates variables that other ranks do not have
    creating_keras_variable = False  # which has hooks of its own, by TensorFlow's
    creating_metric_variable = False
    differentiating = False  # on JAX: what is differentiated in it is a part, its factor that of the whole
    giving_reduced = False  # gradients, to an ``apply`` that would reduce them
    jax_slices: Any = None  # updates: the ranks that have the others, and a number of the compiled step
    loading_alone = False  # what other ranks do not load: it keeps a whole state until that is broadcast
    receiving_values = False  # of variables, from parameter servers
    tracing_step = False  # of a model, for what it creates: the step is not run
    using_own_copy = False  # reads and assigns this process's copy of variables
    writing_files = False  # for other processes, so that it must not communicate


thread = _Thread()


@contextmanager
def doing(what: str, value: Any = True) -> Iterator[None]:
    """The block in which this thread does what the attribute of ``thread`` says, with this value."""
    outer = getattr(thread, what)
    setattr(thread, what, value)
    try:
        yield
    finally:
        setattr(thread, what, outer)
