"""The helpers that scripts import: what is built, and small functions on lists and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from choros.launch.driver.machine import count_accelerators
from choros.parallel import horovod as face

__all__ = [
    "EXTENSIONS",
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")

#: The frameworks that Horovod has extensions for, and choros APIs.
EXTENSIONS = ["tensorflow", "torch"]


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises an ``ImportError`` if the framework of ``ext_name``, such as ``"horovod.torch"``, is not installed."""
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs {framework}, which is not installed: pip install {framework}.")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework ``ext_base_name`` is installed and choros has an API for it."""
    return ext_base_name in EXTENSIONS and find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework ``ext_base_name`` is installed and this machine has GPUs."""
    return extension_available(ext_base_name) and count_accelerators() > 0


def mpi_built(verbose: bool = False) -> bool:
    """As ``horovod.torch.mpi_built``."""
    return face.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """As ``horovod.torch.gloo_built``."""
    return face.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """As ``horovod.torch.nccl_built``."""
    return face.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """As ``horovod.torch.ddl_built``."""
    return face.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """As ``horovod.torch.ccl_built``."""
    return face.ccl_built()


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables within a ``with`` block; those that are ``None`` are left as they are.

    Example:
        >>> with env(HOROVOD_LOG_LEVEL="debug"):
        ...     os.environ["HOROVOD_LOG_LEVEL"]
        'debug'
    """
    wanted = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether ``num_rank`` is a power of two. choros' Adasum takes any number of ranks.

    Example:
        >>> num_rank_is_power_2(4), num_rank_is_power_2(6)
        (True, False)
    """
    return num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  (Horovod's name)
    """Returns ``n`` consecutive parts of ``l``, of which the first ones have one item more if it cannot be divided.

    Example:
        >>> split_list([1, 2, 3, 4, 5], 2)
        [[1, 2, 3], [4, 5]]
    """
    length, longer = divmod(len(l), n)
    starts = [length * index + min(index, longer) for index in range(n + 1)]
    return [l[start:end] for start, end in pairwise(starts)]


def is_iterable(x: Any) -> bool:
    """Whether ``iter(x)`` is possible.

    Example:
        >>> is_iterable([1]), is_iterable(1)
        (True, False)
    """
    try:
        iter(x)
    except TypeError:
        return False
    return True
