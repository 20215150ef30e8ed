"""An iterator of tf.data that measures, in a compiled step too, how long the step waits for it.

::

    began = timestamp ──► IteratorGetNext ──► loaded += timestamp - began ──► the step goes on with the batch

The time from calling the step to the batch would not do: starting a compiled function takes a millisecond.
"""

import functools
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
