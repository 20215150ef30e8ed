"""The ranks' memory allocator, and settings that keep it from returning pages to the kernel.

Gradients are large buffers that a framework frees and allocates again in every step. If the allocator returns them to
the kernel in between, every page causes a page fault again: 160 steps of an MLP with 19.5 million parameters took 56 s
of CPU time with glibc's defaults, and 34 s with the settings below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from choros.config import ALLOCATOR
from choros.errors import ConfigError

__all__ = ["MEMORY", "allocator_settings"]

#: glibc: keep freed memory, in huge pages where the kernel has them, in one arena.
MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
#: The same for the two allocators that are preloaded instead of glibc's.
_PRELOADED = {
    "jemalloc": {"MALLOC_CONF": "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1,narenas:1"},
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "0"},
}
_LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc_minimal", "tcmalloc")}


def _find_library(name: str) -> str | None:
    import ctypes.util  # takes 5 ms in every rank's wrapper, so only if needed

    return ctypes.util.find_library(name)


_PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}


def allocator_settings(
    environ: Mapping[str, str],
    platform: str = sys.platform,
    find: Callable[[str], str | None] = _find_library,
) -> dict[str, str]:
    """Returns the environment variables for the allocator that ``CHOROS_ALLOCATOR`` names.

    If the user has set any of glibc's variables, none is changed.

    Args:
        environ: the rank's environment.
        platform: as ``sys.platform``; only Linux has these settings.
        find: returns the path of a library, given its name without ``lib``.

    Raises:
        ConfigError: the allocator is unknown or not installed on this host.

    Example:
        >>> allocator_settings({"CHOROS_ALLOCATOR": "system"}, "linux")
        {}
        >>> allocator_settings({"CHOROS_ALLOCATOR": "tcmalloc"}, "linux", "lib{}.so.4".format)
        {'LD_PRELOAD': 'libtcmalloc_minimal.so.4', 'TCMALLOC_RELEASE_RATE': '0'}
    """
    name = ALLOCATOR.read(environ)
    if name == "system" or not platform.startswith("linux"):
        return {}
    if name == "glibc":
        return {} if any(variable in environ for variable in MEMORY) else dict(MEMORY)
    library = next((path for library in _LIBRARIES[name] if (path := find(library) or _beside_python(library))), None)
    if library is None:
        raise ConfigError(
            f"{ALLOCATOR.name}={name}: {name} is not installed on this host. Install it (Debian: apt install "
            f"{_PACKAGES[name]}; conda: conda install {name}), or set {ALLOCATOR.name}=glibc."
        )
    preload = " ".join(filter(None, [environ.get("LD_PRELOAD", ""), library]))
    return {"LD_PRELOAD": preload, **{k: v for k, v in _PRELOADED[name].items() if k not in environ}}


def _beside_python(library: str) -> str | None:
    """Returns the path of a library that conda has installed beside this Python."""
    found = sorted(Path(sys.prefix, "lib").glob(f"lib{library}.so*"))
    return str(found[0]) if found else None
