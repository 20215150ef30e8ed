"""What Keras saves is complete at any time: ``choros/durable.py``, around the functions that write a model's files.

::

    complete_files()   model.save(path), keras.saving.save_model(model, path), callbacks, …
                         ─► written(model, write, path)    decides who writes: a strategy, see distribute/saving.py
                              ─► call_unfinished
                                   one file or directory      NAME
                                   several, one of which      NAME_00000.weights.h5, …, then the index NAME
                                   names the others

Weights in several files, and their index, a ``.weights.json``: it changes from one set of files to the next::

    model.weights.json ─► model_00000.weights.h5, model_00001.weights.h5        as Keras names them
      written again    ─► model_00000.1.weights.h5, model_00001.1.weights.h5    the index is replaced in one step;
      and again        ─► model_00000.2.weights.h5, model_00001.2.weights.h5    then the last files are removed

Keras opens ``model_00000.weights.h5`` whatever the index says, so a file of this name remains: a link to the first one.
"""

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from choros.durable import flush, replace, unfinished, workplace
from choros.ownership import followed
from choros.training.thread import thread

#: The names of files that Keras writes one at a time.
_ONE_FILE = (".keras", ".h5", ".hdf5")
#: What is in the directories that TensorFlow and Keras write. One with other files, too, is not replaced.
_OWN_FILES = frozenset(
    {"saved_model.pb", "fingerprint.pb", "keras_metadata.pb", "variables", "assets", "assets.extra", "debug"}
    | {"config.json", "metadata.json", "model.weights.h5"}
)
_SAVED_MODEL = "tf_saved_model"
_SHARD = ".weights.h5"

#: Calls ``write`` where what is saved is to be written: given that, ``write`` and the path.
Written = Callable[[Any, Callable[[], Any], str], Any]

_written: Written | None = None


def decide_writers(written: Written) -> None:
    """Lets ``written`` decide which processes write."""
    global _written
    _written = written


@functools.cache
def complete_files() -> None:
    """Makes all files that Keras saves complete at any time, its callbacks' too."""
    from choros.training.keras_internals.saving import file_writers, make_backups_atomic, share_directories

    for owner, name in file_writers():
        complete(owner, name, "filepath")
    make_backups_atomic()
    share_directories()


def complete(owner: Any, name: str, path: str) -> None:
    """Replaces a function that saves its first argument as its argument ``path``."""
    own: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(own)

    @functools.wraps(own)
    def save(saved: Any, *args: Any, **kwargs: Any) -> Any:
        call = signature.bind(saved, *args, **kwargs)
        call.apply_defaults()
        final = call.arguments[path]
        if not isinstance(final, (str, os.PathLike)):
            return own(saved, *args, **kwargs)
        write = functools.partial(_call_unfinished, own, call, path)
        return write() if _written is None else _written(saved, write, os.fspath(final))

    setattr(owner, name, save)


def _call_unfinished(own: Callable[..., Any], call: inspect.BoundArguments, path: str) -> Any:
    """Calls a function that writes files to its argument ``path``; they get their names when they are complete."""
    block = _block_of(call.arguments[path], call.arguments)
    if block is None:
        return own(*call.args, **call.kwargs)
    from choros.training.keras_internals.saving import messages_about

    final = os.fspath(call.arguments[path])
    with block as name:
        with messages_about(str(name), final) if "format" in call.arguments else nullcontext():
            begun = inspect.BoundArguments(call.signature, {**call.arguments, path: str(name)})  # it may be made again
            result = own(*begun.args, **begun.kwargs)
        if (amend := thread.amending) is not None:
            amend(name)
    return result


def _block_of(path: Any, arguments: Mapping[str, Any]) -> AbstractContextManager[Path] | None:
    """Returns the block in which a function with these arguments writes ``path``; ``None`` if it writes in place."""
    name = os.fspath(path)
    final = os.path.realpath(name)
    if "://" in name or not os.path.isdir(os.path.dirname(final)):
        return None
    if arguments.get("max_shard_size") is not None:
        return _unfinished_shards(name)
    if arguments.get("format", _SAVED_MODEL) != _SAVED_MODEL:
        return _unfinished_export(name)
    is_directory = "format" in arguments or "export_dir" in arguments or arguments.get("zipped") is False
    if is_directory and os.path.isdir(final):
        is_directory = not os.path.ismount(final) and _OWN_FILES.issuperset(os.listdir(final))
    return unfinished(name) if is_directory or name.endswith(_ONE_FILE) else None


@contextmanager
def _unfinished_export(path: str) -> Iterator[Path]:
    """A block that writes a file and weights that it names; absent during renames: readers see old, new or none."""
    final = followed(path)
    with workplace(final.parent) as directory:
        yield directory / final.name
        flush(directory)
        written = sorted(directory.iterdir(), key=lambda file: file.suffix == final.suffix)
        if len(written) > 1:
            final.unlink(missing_ok=True)
        for file in written:
            replace(file, final.with_name(file.name))


@contextmanager
def _unfinished_shards(path: str) -> Iterator[Path]:
    """A block that writes sharded weights as the name it gets; readers find the last or new ones. ``path``: index."""
    index = followed(path).with_suffix(".json")
    shard = re.compile(rf"{re.escape(index.stem.replace('.weights', ''))}_\d{{5}}(\.[12])?{re.escape(_SHARD)}")
    with workplace(index.parent) as directory:
        yield directory / Path(path).name
        there = [match for match in map(shard.fullmatch, os.listdir(index.parent)) if match]
        last_index = index.read_text(errors="replace") if index.exists() else ""
        last = {match[0]: match[1] for match in there if json.dumps(match[0]) in last_index}
        tag = "" if not last else ".2" if ".1" in last.values() else ".1"
        written = sorted(file.name for file in directory.glob(f"*{_SHARD}"))
        names = {name: name.removesuffix(_SHARD) + tag + _SHARD for name in written}
        text = (directory / index.name).read_text()
        for name, new in names.items():
            text = text.replace(json.dumps(name), json.dumps(new))
            (directory / name).rename(directory / new)
        (directory / index.name).write_text(text)
        flush(directory)
        for new in names.values():
            replace(directory / new, index.with_name(new))
        replace(directory / index.name, index)
        first = written[0]
        if tag:
            with suppress(OSError):  # without links, the one that is there remains
                os.link(index.with_name(names[first]), directory / first)
                replace(directory / first, index.with_name(first))
        kept = {first, *names.values()}
        # Some files with tags may be those of a process that was killed.
        for match in there:
            if (match[1] or match[0] in last) and match[0] not in kept:
                index.with_name(match[0]).unlink(missing_ok=True)
