"""Ends iterators of tf.data in a thread of their own. The module imports TensorFlow: import it on demand.

Each has a thread of TensorFlow that tunes it, less and less often: in the end once a minute. Ending the iterator wakes
this thread, but says only then that it is to end: if it looks before, it sleeps once more, and who has dropped the last
reference, such as the garbage collector in a step, waits for it. All ranks would wait for that one::

    step                  drops an iterator ──► goes on
    ended iterators                         ──► waits for its thread
"""

import functools
import queue
import sys
import threading
from typing import Any

import tensorflow as tf


@functools.cache
def end_in_background() -> None:
    """Lets a thread wait for the end of each iterator, for the rest of the process."""
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()  # the garbage collector may interrupt its put by another

    def drop() -> None:
        while True:
            ended.get()  # and forget it

    def ends(iterator: Any) -> None:
        if not sys.is_finalizing():
            held = vars(iterator)
            ended.put([held.pop(name, None) for name in ("_iterator_resource", "_components")])

    owner: Any = tf.data.IteratorSpec(tf.TensorSpec(())).value_type
    owner.__del__ = ends
    threading.Thread(target=drop, name="choros: ended iterators", daemon=True).start()
