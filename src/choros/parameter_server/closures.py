"""The pickling of functions and their arguments for workers, and of results for the chief.

Cloudpickle, with these exceptions::

    objects of the scope, data sets of workers     references by number           (ScopeObjects)
    other layers, models, optimizers, metrics,     recipes                        (parameter_server/recipes.py)
    Keras' losses
    tf.function                                    its Python function, wrapped again by the receiver
    tensors of TensorFlow, torch and JAX           arrays, converted to tensors by the receiver
    tf.Variables and torch's Parameters            copies, which the receiver gets a list of
    code                                           with the name of its file; the lines of the script and of cells go
                                                   with it, for AutoGraph and tracebacks
"""

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any, final

import cloudpickle
import numpy as np

from choros.arrays import adapter_of, framework_adapter
from choros.comm import Array
from choros.errors import ConfigError
from choros.launch.bootstrap import reduce_code
from choros.parameter_server.messages import Reference
from choros.parameter_server.recipes import by_recipe

#: The package of a tensor's class → its framework and the name of all its tensors' class.
_TENSORS = {
    "jax": ("jax", "Array"),
    "jaxlib": ("jax", "Array"),
    "torch": ("torch", "Tensor"),
    "tensorflow": ("tensorflow", "Tensor"),
}


def dumps(item: Any, reference: Callable[[Any], Reference | None]) -> bytes:
    """Pickles ``item``; what ``reference`` returns replaces an object; other Keras objects go by recipe."""
    file = io.BytesIO()
    try:
        _Pickler(file, reference).dump(item)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name_of(item)} cannot be sent to a worker: {error}. Functions and arguments are pickled with "
            "cloudpickle: create objects that hold threads, files or native handles on the worker, in the function or "
            "in create_per_worker_dataset()."
        ) from error
    return file.getvalue()


#: A framework's variable that a function has captured, as a worker has it, and its first value.
Copy = tuple[Any, Array]


def loads(pickled: Any, resolve: Callable[[Reference], Any], copies: list[Copy] | None = None) -> Any:
    """Unpickles the output of ``dumps``; ``resolve`` returns the objects of its references. Adds to ``copies``."""
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.resolve, unpickler.copies = resolve, [] if copies is None else copies
    return unpickler.load()


def check_unchanged(copies: Sequence[Copy], name: str) -> None:
    """Raises if the function of this name has changed a variable that is a copy."""
    for variable, first in copies:
        if not np.array_equal(adapter_of(variable).to_host(variable), first):
            raise ConfigError(
                f"{name} has changed a {type(variable).__name__} of shape {first.shape} that it has captured or been "
                "given: each worker has a copy of its own, which the chief does not see. Make it a weight of a Keras "
                "model that is created within `with strategy.scope():`, or return the value."
            )


def name_of(item: Any) -> str:
    """Returns the name of ``item`` in error messages."""
    return getattr(item, "__qualname__", None) or f"the {type(item).__name__}"


@final
class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, reference: Callable[[Any], Reference | None]) -> None:
        super().__init__(file, protocol=5)
        self._reference = reference

    def persistent_id(self, item: Any) -> Reference | None:
        return self._reference(item)

    def reducer_override(self, item: Any) -> Any:
        package = type(item).__module__.partition(".")[0]
        if package == "tensorflow" and hasattr(item, "python_function") and hasattr(item, "get_concrete_function"):
            options = {
                "input_signature": item.input_signature,
                "jit_compile": getattr(item, "_jit_compile", None),
                "reduce_retracing": getattr(item, "_reduce_retracing", False),
            }
            return _tf_function, (item.python_function, options)
        if package == "tensorflow" and isinstance(item, sys.modules[package].Variable) and item.trainable:
            return _copied, item.__reduce__()
        framework, tensor = _TENSORS.get(package, ("", ""))
        if framework and isinstance(item, getattr(sys.modules[framework], tensor)):
            values = framework, adapter_of(item).to_host(item)
            is_parameter = framework == "torch" and isinstance(item, sys.modules[framework].nn.Parameter)
            return (_copied, (_tensor, values)) if is_parameter else (_tensor, values)
        if isinstance(item, CodeType):
            return reduce_code(item)
        if isinstance(item, ModuleType) and sys.modules.get(item.__name__) is item:
            return importlib.import_module, (item.__name__,)  # such as torch.ops, an instance of its own class
        if not isinstance(item, type):
            recipe = by_recipe(item, lambda part: self._reference(part) is not None)
            if recipe is not None:
                return recipe
        return super().reducer_override(item)


@final
class _Unpickler(pickle.Unpickler):
    resolve: Callable[[Reference], Any]
    copies: list[Copy]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._note_copy if found is _copied else found

    def _note_copy(self, create: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        variable = create(*arguments)
        self.copies.append((variable, np.array(adapter_of(variable).to_host(variable))))
        return variable

    def persistent_load(self, reference: Reference) -> Any:
        return self.resolve(reference)


def _copied(create: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    return create(*arguments)


def _tensor(framework: str, host: Any) -> Any:
    like = None
    if framework == "torch":
        import torch

        like = torch.empty(0)
    return framework_adapter(framework).from_host(host, like)


def _tf_function(python_function: Callable[..., Any], options: dict[str, Any]) -> Any:
    import tensorflow as tf

    return tf.function(python_function, **options)
