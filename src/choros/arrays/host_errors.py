"""Errors of functions on the host that compiled code calls: the caller of that code gets the error that was raised.

A framework passes on only its text, in an exception of its own. That exception becomes one of the host's class, too::

    host       MismatchError("… rank 0: … rank 1: …")     remember() keeps it
                 │ its text
    framework  JaxRuntimeError("INTERNAL: … rank 0: …")   recognize_errors(): contains the text of one that is kept
                 │
    caller     an instance of both

The framework's constructor, the only code of Python between the two, creates instances of a subclass of both.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from choros.errors import ChorosError

#: Those of the last calls; several threads may make some.
_remembered: deque[ChorosError] = deque(maxlen=16)
#: The attribute of an exception of a framework that has the host's.
_HOST_ERROR = "_choros_host_error"


def remember(error: ChorosError) -> None:
    """Keeps an error that what a framework calls on the host is about to raise."""
    _remembered.append(error)


def recognize_errors(theirs: Any, subclass_of: Callable[[Any], Any]) -> None:
    """Lets exceptions of class ``theirs``, but not of its subclasses, also be of the class that the host raised."""

    def create(cls: type[Exception], *args: object, **kwargs: object) -> Exception:
        error = None
        if cls is theirs:
            text = next((arg for arg in args if isinstance(arg, str)), "")
            error = next((each for each in reversed(_remembered) if str(each) and str(each) in text), None)
        created: Exception = Exception.__new__(cls if error is None else subclass_of(type(error)), *args, **kwargs)
        if error is not None:
            vars(created).update({**vars(error), _HOST_ERROR: error})
        return created

    theirs.__new__ = create


def error_of_host(error: BaseException) -> BaseException:
    """Returns the host's exception, whose text is a sentence, if ``error`` is a framework's in its place; else it."""
    original: BaseException = getattr(error, _HOST_ERROR, error)
    return original
