"""Three things that scripts for Horovod use, and Keras 3 has dropped: importing this module brings them back."""

import functools
from typing import Any

import keras  # noqa: TID253  (only Keras' faces import this module)

__all__ = ["CallableList"]


class CallableList(list[Any]):
    """A list whose call returns it: Keras 2 has ``optimizer.variables()``, Keras 3 ``optimizer.variables``."""

    def __call__(self) -> "CallableList":
        """Returns the list."""
        return self


_compile = keras.Model.compile


def _variables_as_in_keras_2(variables: Any) -> property:
    return property(lambda self: CallableList(variables.fget(self)), doc=variables.__doc__)


@functools.wraps(_compile)
def _compile_as_in_keras_2(self: Any, *args: Any, experimental_run_tf_function: bool = False, **kwargs: Any) -> None:
    _compile(self, *args, **kwargs)


for _kind in vars(keras.optimizers).values():  # those that have their own, as LossScaleOptimizer, too
    if _kind is keras.optimizers.Optimizer or (isinstance(_kind, type) and "variables" in vars(_kind)):
        _kind.variables = _variables_as_in_keras_2(_kind.variables)
# Where Keras has it: it warns of a model whose ``compile`` is not this one.
next(each for each in keras.Model.__mro__ if "compile" in vars(each)).compile = _compile_as_in_keras_2
#: A key for dictionaries, as of TensorFlow's own variables.
keras.Variable.ref = lambda self: self.value.ref()
