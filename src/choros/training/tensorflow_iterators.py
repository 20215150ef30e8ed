"""Iterators of tf.data: how long steps wait for them, and a thread that ends them. It imports TensorFlow: import it on
demand.

A compiled step measures its own wait. The time from its call to the batch would not do: a compiled function takes a
millisecond to start::

    began = timestamp ──► IteratorGetNext ──► loaded += timestamp - began ──► the step goes on with the batch

Each iterator has a thread of TensorFlow that tunes it, less and less often: in the end once a minute. Ending the
iterator wakes this thread, but says only then that it is to end: if it looks before, it sleeps once more, and who has
dropped the last reference, such as the garbage collector in a step, waits for it. All ranks would wait for that one::

    step                  drops an iterator ──► goes on
    ended iterators                         ──► waits for its thread
"""

import functools
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, final

import tensorflow as tf

_OwnedIterator: Any = tf.data.IteratorSpec(tf.TensorSpec(())).value_type


@functools.cache
def loaded() -> Any:
    """The seconds that steps have waited for data so far, a variable."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0.0, trainable=False, dtype="float64", name="loaded")


@final
class TimedIterator(_OwnedIterator):
    """Reads what another iterator would, which must live as long, and adds the time that this takes to ``loaded()``."""

    @classmethod
    def of(cls, iterator: Any) -> Any:
        """Returns ``iterator`` timed, or as it is if it is another one: of devices, of a program."""
        if type(iterator) is not _OwnedIterator:
            return iterator
        spec = _Spec(iterator.element_spec)
        return cls(components=spec._to_components(iterator), element_spec=iterator.element_spec)

    @property
    def _type_spec(self) -> Any:
        return _Spec(self.element_spec)

    def get_next(self, name: str | None = None) -> Any:
        """Returns the next batch."""
        del name
        return _timed(super().get_next)

    def get_next_as_optional(self) -> Any:
        """Returns the next batch, or that there is none, as Keras reads if a call makes several steps."""
        return _timed(super().get_next_as_optional)


class _Spec(tf.data.IteratorSpec):
    """What a compiled function knows of a timed iterator: that of its elements."""

    @property
    def value_type(self) -> type:
        return TimedIterator

    def _from_components(self, components: Any) -> TimedIterator:
        return TimedIterator(components=components, element_spec=self._element_spec)

    @staticmethod
    def from_value(value: TimedIterator) -> "_Spec":
        return _Spec(value.element_spec)


def _timed(read: Callable[[], Any]) -> Any:
    began = tf.timestamp()
    with tf.control_dependencies([began]):
        data = read()
    with tf.control_dependencies(tf.nest.flatten(data, expand_composites=True)):
        added = loaded().assign_add(tf.timestamp() - began)
    with tf.control_dependencies([added]):  # else the whole step may come first
        return tf.nest.map_structure(tf.identity, data, expand_composites=True)


@functools.cache
def end_in_background() -> None:
    """Lets a thread wait for the end of each iterator, for the rest of the process."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the garbage collector may interrupt its put by another

    def drop() -> None:
        while True:
            ended.get()  # and forget it

    def ends(iterator: Any, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            held = vars(iterator)
            ended.put([held.pop(name, None) for name in ("_iterator_resource", "_components")])

    _OwnedIterator.__del__ = ends
    threading.Thread(target=drop, name="choros: ended iterators", daemon=True).start()
