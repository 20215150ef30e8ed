"""Files that are complete at any time: written under another name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["unfinished"]


@contextmanager
def unfinished(path: str | os.PathLike[str], writer: str = "") -> Iterator[Path]:
    """A block that writes a file under the name it gets; the file gets the name ``path`` when the block has ended.

    Whatever ends the process, or the block, in between: the file of that name is the last complete one.

    Args:
        path: the file. If it is a link, its target is replaced.
        writer: distinguishes processes that write it at once; the same for the next process in its place, which
            overwrites what this one may leave unfinished.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "model.txt"
        >>> with unfinished(path) as name:
        ...     _ = name.write_text("weights")
        ...     path.exists()
        False
        >>> path.read_text()
        'weights'
    """
    final = Path(os.path.realpath(path))
    # Keras chooses the format by the suffix, so this name keeps it.
    name = final.with_name(f".unfinished.{writer}{final.name}")
    try:
        yield name
        name.replace(final)
    except BaseException:
        with suppress(OSError):
            name.unlink()
        raise
