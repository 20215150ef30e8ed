"""What is private to Keras is reached for in one module, ``training/keras_internals.py``."""

import re
from pathlib import Path

import choros

PACKAGE = Path(choros.__file__).parent
ONE_PLACE = PACKAGE / "training" / "keras_internals.py"
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
#: Names that objects of Keras have in this package: nothing private of theirs is asked for.
OBJECTS = ("base", "inner", "kernel", "layer", "metric", "model", "optimizer", "rate", "scale", "variable")
REACHES = re.compile(
    rf"\bkeras\.src\b|\.({'|'.join(PRIVATE)})\b|[\"']({'|'.join(PRIVATE)})[\"']|\b({'|'.join(OBJECTS)})\._[a-z]"
)


def test_keras_is_reached_for_inside_in_one_module() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != ONE_PLACE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if REACHES.search(line)
    ]
    assert found == []


def test_all_of_the_list_is_needed() -> None:
    source = ONE_PLACE.read_text()
    assert [name for name in PRIVATE if not re.search(rf"\b{name}\b", source)] == []
