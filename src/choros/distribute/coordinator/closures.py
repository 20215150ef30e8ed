"""The pickling of functions and their arguments for workers, and of results for the chief.

Cloudpickle, with these exceptions::

    objects of the scope, data sets of workers     references by number           (ScopeObjects, Worker)
    other layers, models, optimizers, metrics      recipes                        (parameter_server/recipes.py)
    tf.function                                    its Python function, wrapped again by the receiver
    tensors of TensorFlow, torch and JAX           arrays, converted to tensors by the receiver
    Keras losses                                   serialized by Keras
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, final

import cloudpickle

from choros.arrays import adapter_of
from choros.errors import ConfigError

__all__ = ["Reference", "dumps", "loads", "name_of"]

#: Identifies an object that is sent by reference.
Reference = tuple[Any, ...]


def dumps(item: Any, reference: Callable[[Any], Reference | None]) -> bytes:
    """Pickles ``item``.

    Args:
        item: the object to pickle.
        reference: returns the reference that replaces an object, or ``None`` to pickle it by value; Keras objects
            then by their recipe.

    Raises:
        ConfigError: a part of ``item`` cannot be pickled.
    """
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


def loads(pickled: Any, resolve: Callable[[Reference], Any]) -> Any:
    """Unpickles the output of ``dumps``; ``resolve`` returns the objects of its references."""
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.resolve = resolve
    return unpickler.load()


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
            return _tf_function, (item.python_function, _options(item))
        if _is_tensor(package, item):
            return _tensor, (package, adapter_of(item).to_host(item))
        if isinstance(item, ModuleType) and sys.modules.get(item.__name__) is item:
            return importlib.import_module, (item.__name__,)  # such as torch.ops, an instance of its own class
        if "keras" in sys.modules and not isinstance(item, type):
            from choros.distribute.parameter_server.recipes import by_recipe

            recipe = by_recipe(item, lambda part: self._reference(part) is not None)
            if recipe is not None:
                return recipe
        if package == "keras" and _is_loss(item):
            # Plain pickling includes a timestamp: workers would treat each copy as a new function and retrace it.
            return _loss, (_keras().saving.serialize_keras_object(item),)
        return super().reducer_override(item)


@final
class _Unpickler(pickle.Unpickler):
    resolve: Callable[[Reference], Any]

    def persistent_load(self, reference: Reference) -> Any:
        return self.resolve(reference)


def _is_tensor(package: str, item: Any) -> bool:
    if package in ("jaxlib", "jax"):
        import jax

        return isinstance(item, jax.Array)
    if package == "torch":
        import torch

        return isinstance(item, torch.Tensor)
    if package == "tensorflow":
        import tensorflow as tf

        return isinstance(item, tf.Tensor)
    return False


def _tensor(package: str, host: Any) -> Any:
    if package == "tensorflow":
        import tensorflow as tf

        return tf.convert_to_tensor(host)
    if package == "torch":
        import torch

        from choros.arrays import framework_adapter

        return framework_adapter("torch").from_host(host, torch.empty(0))
    import jax.numpy as jnp

    return jnp.asarray(host)


def _keras() -> Any:
    return sys.modules.get("keras") or importlib.import_module("keras")


def _is_loss(item: Any) -> bool:
    return isinstance(item, _keras().losses.Loss)


def _loss(serialized: Any) -> Any:
    return _keras().saving.deserialize_keras_object(serialized)


def _options(function: Any) -> dict[str, Any]:
    return {
        "input_signature": function.input_signature,
        "jit_compile": getattr(function, "_jit_compile", None),
        "reduce_retracing": getattr(function, "_reduce_retracing", False),
    }


def _tf_function(python_function: Callable[..., Any], options: dict[str, Any]) -> Any:
    tf = sys.modules.get("tensorflow") or __import__("tensorflow")
    return tf.function(python_function, **options)
