"""Which kind of data set something is, asked without loading the package it would come from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["is_data_loader", "is_grain", "is_py_dataset", "is_tf_data"]


def _instance_of(package: str, *paths: str) -> Callable[[Any], bool]:
    """Whether something is an instance of one of a package's classes, which proves that it is loaded."""

    def check(data: Any) -> bool:
        module = sys.modules.get(package)
        if module is None:
            return False
        classes = []
        for path in paths:
            each: Any = module
            for part in path.split("."):
                each = getattr(each, part)
            classes.append(each)
        return isinstance(data, tuple(classes))

    return check


#: ``keras.utils.PyDataset``.
is_py_dataset = _instance_of("keras", "utils.PyDataset")
#: ``tf.data.Dataset``.
is_tf_data = _instance_of("tensorflow", "data.Dataset")
#: ``torch.utils.data.DataLoader``.
is_data_loader = _instance_of("torch.utils.data", "DataLoader")
#: Grain's ``MapDataset``, ``IterDataset`` and ``DataLoader``.
is_grain = _instance_of("grain", "MapDataset", "IterDataset", "DataLoader")
