"""Numbers of bytes as text, such as ``4KiB``."""

from __future__ import annotations

import re

from choros.errors import ConfigError

__all__ = ["format_bytes", "parse_sizes"]

_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_NAMES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SIZE = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)
#: The factor from one size of a range to the next.
_STEP = 4


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses sizes, separated by commas, and ranges, which grow by a factor of four, into numbers of bytes.

    Raises:
        ConfigError: a size is malformed, or a range is empty.

    Example:
        >>> parse_sizes("512, 4KiB")
        (512, 4096)
        >>> parse_sizes("1MiB..20MiB")
        (1048576, 4194304, 16777216, 20971520)
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        size, end = _parse(first), _parse(last if dots else first)
        if size > end:
            raise ConfigError(f"--sizes {part.strip()}: the range is empty. Write the smaller size first.")
        while size < end:
            sizes.append(size)
            size *= _STEP
        sizes.append(end)
    return tuple(dict.fromkeys(sizes))


def _parse(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise ConfigError(
            f"--sizes: {text.strip()!r} is not a size. Write sizes like 4KiB,256KiB,16MiB, or a range like "
            "1MiB..256MiB; units are B, KiB, MiB and GiB."
        )
    return int(match[1]) * unit


def format_bytes(size: int) -> str:
    """Formats ``size`` bytes in the largest unit that fits.

    Example:
        >>> format_bytes(4096), format_bytes(1536 << 10), format_bytes(1000), format_bytes(470852)
        ('4 KiB', '1.5 MiB', '1000 B', '459.8 KiB')
    """
    for name, unit in _NAMES:
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size} B"
