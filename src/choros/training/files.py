"""Files that are complete at any time: written under another name, then renamed."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["unfinished", "unfinished_group"]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def unfinished(path: str | os.PathLike[str], writer: str = "") -> Iterator[Path]:
    """A block that writes a file, or a directory, under the name it gets; it gets the name ``path`` after the block.

    Whatever ends the process, or the block, in between: the file of that name is the last complete one.

    Args:
        path: the file or directory. If it is a link, its target is replaced.
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
    if name.is_dir():
        _remove(name)
    try:
        yield name
        if name.is_dir() and final.is_dir():
            _exchange(name, final)
            _remove(name)
        else:
            name.replace(final)
    except BaseException:
        with suppress(OSError):
            _remove(name)
        raise


@contextmanager
def unfinished_group(path: str | os.PathLike[str], index: str, writer: str = "") -> Iterator[Path]:
    """A block that writes several files, in one directory, of which one refers to the others.

    While they get their names, that one does not exist: whoever reads finds the old files, the new ones or none.

    Args:
        path: the name that the block is to use; it gets the same name in a directory of its own.
        index: the suffix of the file that refers to the others.
        writer: as for ``unfinished``.
    """
    final = Path(os.path.realpath(path))
    directory = final.with_name(f".unfinished.{writer}{final.name}")
    _remove(directory)
    directory.mkdir()
    try:
        yield directory / final.name
        written = sorted(directory.iterdir(), key=lambda file: file.suffix == index)
        for file in written:
            if file.suffix == index:
                (final.parent / file.name).unlink(missing_ok=True)
        for file in written:
            file.replace(final.parent / file.name)
    finally:
        with suppress(OSError):
            _remove(directory)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchanges the names of two directories: in one step on Linux, where the file system can do so."""
    names = (os.fsencode(one), os.fsencode(other))
    with suppress(AttributeError):
        if ctypes.CDLL(None).renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    aside = one.with_name(f"{one.name}.old")
    _remove(aside)
    other.replace(aside)
    one.replace(other)
    aside.replace(one)
