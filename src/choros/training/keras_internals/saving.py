"""How Keras writes and reads files, and describes layers."""

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras
from keras.src.legacy.saving.legacy_h5_format import (
    load_optimizer_weights_from_hdf5_group as load_optimizer_weights_from_hdf5_group,  # how load_model does it
)
from keras.src.saving import serialization_lib

from choros.durable import discard, unfinished
from choros.training.keras_internals.fit import set_initial_epoch
from choros.training.keras_internals.models import layers_of
from choros.training.replaced import replaced
from choros.training.thread import doing

#: The attribute of a file of weights with the epoch of a backup.
_BACKUP = "choros_backup"


def file_writers() -> list[tuple[Any, str]]:
    """The functions that write a model's files, as module or class and name; all public ones call these."""
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    return [
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
        (keras.Model, "export"),
    ]


@contextmanager
def messages_about(name: str, final: str) -> Iterator[None]:
    """A context in which Keras prints ``final`` in place of ``name``, under which it writes a file."""
    from keras.src.utils import io_utils

    own = io_utils.print_msg
    with replaced(
        io_utils, print_msg=lambda message, *args, **kwargs: own(message.replace(name, final), *args, **kwargs)
    ):
        yield


def share_directories() -> None:
    """Makes callbacks, which all processes have, accept a directory that another process creates at the same time."""
    from keras.src.utils import file_utils

    create = file_utils.makedirs

    def makedirs(path: str) -> None:
        try:
            create(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    file_utils.makedirs = makedirs


def make_backups_atomic() -> None:
    """Makes ``BackupAndRestore`` save weights and epoch in one step, in the weights' file; Keras alone reads another. A
    rank may load one alone.
    """
    from keras.src.callbacks.backup_and_restore import BackupAndRestore
    from keras.src.utils import file_utils

    own_load, own_save, own_end = (
        doing("loading_alone")(BackupAndRestore._load_model),
        BackupAndRestore._save_model,
        BackupAndRestore.on_train_end,
    )

    def is_ours(backup: Any) -> bool:
        return not file_utils.is_remote_path(backup.backup_dir)

    def save(backup: Any) -> None:
        if not is_ours(backup):
            own_save(backup)
            return
        metadata = json.dumps({"epoch": backup._current_epoch, "batch": backup._last_batch_seen})
        weights, text = Path(backup._weights_path), Path(backup._training_metadata_path)
        weights.parent.mkdir(parents=True, exist_ok=True)
        if backup.double_checkpoint:
            for file, copy in ((weights, backup._prev_weights_path), (text, backup._prev_training_metadata_path)):
                if file.exists():
                    with unfinished(copy) as name:
                        shutil.copyfile(file, name)

        def note_epoch(file: Path) -> None:
            import h5py

            with h5py.File(file, "r+") as opened:
                opened.attrs[_BACKUP] = metadata

        with doing("amending", note_epoch):
            backup.model.save_weights(filepath=str(weights), overwrite=True)
        with unfinished(text) as name:
            name.write_text(metadata)

    def load(backup: Any) -> None:
        own_load(backup)
        if is_ours(backup) and os.path.exists(backup._weights_path):
            import h5py

            with h5py.File(backup._weights_path) as file:
                metadata = file.attrs.get(_BACKUP)
            if metadata is not None:
                set_initial_epoch(backup.model, json.loads(metadata)["epoch"])

    def on_train_end(backup: Any, logs: Any = None) -> None:
        if not is_ours(backup):
            own_end(backup, logs)
        elif backup.delete_checkpoint and os.path.exists(backup.backup_dir):
            discard(backup.backup_dir)

    BackupAndRestore._load_model, BackupAndRestore._save_model = load, save
    BackupAndRestore.on_train_end = functools.wraps(own_end)(on_train_end)


def serialize_sharing(layer: Any, given: Mapping[int, Any]) -> Any:
    """A layer's configuration, not compiled, ``given`` ones as ids; the public function notes sharing within a file."""
    with ExitStack() as stack:
        stack.enter_context(serialization_lib.ObjectSharingScope())
        for each in given.values():
            serialization_lib.record_object_after_serialization(each, {"module": ""})
            stack.enter_context(replaced(each, get_config=lambda name=each.name: {"name": name}))
        for each in layers_of(layer):
            if getattr(each, "compiled", False):
                stack.enter_context(replaced(each, compiled=False))
        return serialization_lib.serialize_keras_object(layer)


def deserialize_sharing(config: Any, given: Mapping[int, Any], custom_objects: Mapping[str, Any]) -> Any:
    """The layer of ``serialize_sharing``'s configuration, as if ``given`` were uncalled: calls are numbered in it."""
    calls = {key: list(layer._inbound_nodes) for key, layer in given.items()}
    with serialization_lib.ObjectSharingScope():
        for key, layer in given.items():
            layer._inbound_nodes.clear()
            serialization_lib.record_object_after_deserialization(layer, key)
        try:
            return serialization_lib.deserialize_keras_object(config, dict(custom_objects), safe_mode=False)
        finally:
            for key, layer in given.items():
                layer._inbound_nodes[:0] = calls[key]
