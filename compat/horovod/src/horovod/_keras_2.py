"""Three things that scripts for Horovod use, and Keras 3 has dropped: importing this module brings them back."""

import functools
from typing import Any

from choros.training.keras_internals import AnyVariable, BaseOptimizer, Trainer

__all__ = ["CallableList"]


class CallableList(list[Any]):
    """A list whose call returns it: Keras 2 has ``optimizer.variables()``, Keras 3 ``optimizer.variables``."""

    def __call__(self) -> "CallableList":
        """Returns the list."""
        return self


_variables, _compile = BaseOptimizer.variables, Trainer.compile


@functools.wraps(_compile)
def _compile_as_in_keras_2(self: Any, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> None:
    _compile(self, *args, **kwargs)


BaseOptimizer.variables = property(lambda self: CallableList(_variables.fget(self)), doc=_variables.__doc__)
Trainer.compile = _compile_as_in_keras_2
#: A key for dictionaries, as of TensorFlow's own variables.
AnyVariable.ref = lambda self: self.value.ref()
