"""What each thread does at present: what its functions must do, or leave out, meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    applying_optimizer = False  # which may contain other optimizers
    applying_updates = False  # of a distributed optimizer: all ranks make the same
    building_slices = False  # creates variables that other ranks do not have
    creating_keras_variable = False  # which has hooks of its own, by TensorFlow's
    creating_metric_variable = False
    differentiating = False  # on JAX: what is differentiated in it is a part, its factor that of the whole
    giving_reduced = False  # gradients, to an ``apply`` that would reduce them
    loading_alone = False  # what other ranks do not load: it keeps a whole state until that is broadcast
    receiving_values = False  # of variables, from parameter servers
    tracing_step = False  # of a model, for what it creates: the step is not run
    using_own_copy = False  # reads and assigns this process's copy of variables
    writing_files = False  # for other processes, so that it must not communicate


thread = _Thread()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """The block in which this thread does what the attribute of ``thread`` says."""
    outer = getattr(thread, what)
    setattr(thread, what, True)
    try:
        yield
    finally:
        setattr(thread, what, outer)
