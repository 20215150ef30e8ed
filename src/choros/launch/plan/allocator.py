"""Which allocator gives the ranks their memory, and how it is kept from giving pages back.

Gradients are large buffers that a framework frees and asks for again in every step. An allocator that returns them
to the kernel meanwhile has them faulted in anew, page by page: an MLP of 19.5 million parameters spent 56 s of CPU
time on 160 steps so, and 34 s with the settings below, as measured with glibc's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from choros.config import ALLOCATOR
from choros.errors import ConfigError

__all__ = ["MEMORY", "allocator_settings"]

#: glibc: keep what was freed, in huge pages where the kernel has them, in one arena.
MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
#: The same of the two that are loaded in glibc's place.
_PRELOADED = {
    "jemalloc": {"MALLOC_CONF": "thp:always,dirty_decay_ms:-1,muzzy_decay_ms:-1,narenas:1"},
    "tcmalloc": {"TCMALLOC_RELEASE_RATE": "0"},
}
_LIBRARIES = {"jemalloc": ("jemalloc",), "tcmalloc": ("tcmalloc_minimal", "tcmalloc")}


def _find_library(name: str) -> str | None:
    import ctypes.util  # 5 ms, which every rank's wrapper would spend

    return ctypes.util.find_library(name)


_PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}


def allocator_settings(
    environ: Mapping[str, str],
    platform: str = sys.platform,
    find: Callable[[str], str | None] = _find_library,
) -> dict[str, str]:
    """What a rank's environment needs for the allocator that ``CHOROS_ALLOCATOR`` names.

    A user who has set any of glibc's variables is left alone.

    Args:
        environ: the rank's.
        platform: as ``sys.platform``; only Linux has these settings.
        find: where a library lies, by its name without ``lib``.

    Raises:
        ConfigError: the allocator is not installed on this host, or is none we know.

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
            f"{_PACKAGES[name]}; conda: conda install {name}), or leave {ALLOCATOR.name} at glibc."
        )
    preload = " ".join(filter(None, [environ.get("LD_PRELOAD", ""), library]))
    return {"LD_PRELOAD": preload, **{k: v for k, v in _PRELOADED[name].items() if k not in environ}}


def _beside_python(library: str) -> str | None:
    """Where conda installs libraries."""
    found = sorted(Path(sys.prefix, "lib").glob(f"lib{library}.so*"))
    return str(found[0]) if found else None
