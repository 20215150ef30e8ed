"""Errors that are also TensorFlow's, so that ``except`` clauses of scripts for Horovod handle them. From a
``tf.function`` or a session TensorFlow passes on the text only, of a ``ValueError`` as an
``InvalidArgumentError``, of others as an ``UnknownError``: see ``host_errors.py``.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from choros.arrays.host_errors import recognize_errors
from choros.errors import ConfigError, MismatchError

#: What to do if the threads of a session do not suffice.
_ADVICE = (
    "A session of TensorFlow 1 begins what one run() fetches in any order, and each collective waits in one of its "
    "threads. If they are fewer than collectives, ranks may begin with different ones: order these by "
    "tf.control_dependencies, or give the session a thread for each, by config=tf.compat.v1.ConfigProto("
    "use_per_session_threads=True, inter_op_parallelism_threads=…)."
)


@functools.cache
def _also(theirs: Any, own: Any) -> Any:
    """Returns a subclass of both, named as ``own``, with ``theirs``' arguments; mismatches are Horovod's error, too."""
    bases = (tf.errors.FailedPreconditionError, theirs) if own is MismatchError else (theirs,)
    code = bases[0](None, None, "").error_code

    def initialize(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, code, *args)

    def reduce(self: Any) -> Any:
        return own, (self.message,)

    namespace = {"__init__": initialize, "__reduce__": reduce, "__module__": own.__module__, "__doc__": own.__doc__}
    return type(own.__name__, (own, *bases), namespace)


@contextmanager
def tensorflow_errors() -> Iterator[None]:
    """A context for eager calls, whose errors that Horovod raises as TensorFlow's are these, too."""
    try:
        yield
    except (MismatchError, ConfigError) as error:
        own: Any = type(error)
        if own not in (MismatchError, ConfigError):
            raise
        combined = _also(tf.errors.InvalidArgumentError, own)
        raise combined(None, None, str(error)).with_traceback(error.__traceback__) from None


@contextmanager
def session_errors() -> Iterator[None]:
    """A context for calls of a session of TensorFlow 1: errors of ranks that ask for different names have a remedy."""
    try:
        yield
    except MismatchError as error:
        if len(set(re.findall(r"\(name='([^']*)'", str(error)))) < 2:
            raise
        raise MismatchError(f"{error}\n{_ADVICE}") from None


for _class in (tf.errors.InvalidArgumentError, tf.errors.UnknownError):
    recognize_errors(_class, functools.partial(_also, _class))
