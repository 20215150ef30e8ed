"""Five things that scripts for Horovod use, and Keras 3 has dropped: importing this module brings them back."""

import functools
from typing import Any

import keras  # noqa: TID253  (only Keras' faces import this module)
from keras._tf_keras.keras import backend as _backend  # noqa: TID253  (tf.keras.backend, without TensorFlow)

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


def _set_learning_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


keras.optimizers.Optimizer.lr = property(lambda self: self.learning_rate, _set_learning_rate)
for _kind in vars(keras.optimizers).values():  # those that have their own, as LossScaleOptimizer, too
    if _kind is keras.optimizers.Optimizer or (isinstance(_kind, type) and "variables" in vars(_kind)):
        _kind.variables = _variables_as_in_keras_2(_kind.variables)
# Where Keras has it: it warns of a model whose ``compile`` is not this one.
next(each for each in keras.Model.__mro__ if "compile" in vars(each)).compile = _compile_as_in_keras_2
# The second is tf.keras.backend, whose own takes TensorFlow's variables only.
for _module in (keras.backend, _backend):
    _module.set_value = lambda x, value: x.assign(value)
#: A key for dictionaries, as of TensorFlow's own variables.
keras.Variable.ref = lambda self: self.value.ref()
