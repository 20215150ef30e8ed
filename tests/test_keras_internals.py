"""Private names of Keras are used in one folder only, ``training/keras_internals``."""

import re
from pathlib import Path

import choros

PACKAGE = Path(choros.__file__).parent
ONLY_FOLDER = PACKAGE / "training" / "keras_internals"
PRIVATE = (
    "_accumulated_gradients",
    "_exclude_from_weight_decay",
    "_filter_empty_gradients",
    "_flatten_layers",
    "_flatten_metrics_in_order",
    "_get_jax_state",
    "_initial_epoch",
    "_inner_optimizers",
    "_iterations",
    "_jax_state",
    "_jax_state_synced",
    "_learning_rate",
    "_maybe_symbolic_build",
    "_non_trainable_variables",
    "_symbolic_build",
    "_trainable_variables",
    "_trainable_variables_indices",
    "_use_weight_decay",
    "_var_key",
)
#: Variable names of Keras' objects in this package: no private attribute of them is used.
OBJECTS = ("base", "inner", "kernel", "layer", "metric", "model", "optimizer", "rate", "scale", "variable")
PRIVATE_USE = re.compile(
    rf"\bkeras\.src\b|\.({'|'.join(PRIVATE)})\b|[\"']({'|'.join(PRIVATE)})[\"']|\b({'|'.join(OBJECTS)})\._[a-z]"
)


def test_private_names_of_keras_are_used_in_one_folder() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != ONLY_FOLDER
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PRIVATE_USE.search(line)
    ]
    assert found == []


def test_every_listed_name_is_used() -> None:
    source = "".join(path.read_text() for path in ONLY_FOLDER.glob("*.py"))
    assert [name for name in PRIVATE if not re.search(rf"\b{name}\b", source)] == []
