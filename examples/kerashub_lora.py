"""Fine-tuning a language model of KerasHub with LoRA: few variables are trained, all others stay as they are.

On one process, on two, and on another framework::

    python examples/kerashub_lora.py
    chorosrun -np 2 python examples/kerashub_lora.py
    KERAS_BACKEND=torch chorosrun -np 2 python examples/kerashub_lora.py --json figures.json

Nothing is downloaded: the preset is a tiny GPT-2 that this script makes and saves, in place of one of KerasHub's, and
the texts are sequences that count upwards, modulo the vocabulary, in steps of their own. ``--preset`` takes another
one; remove ``preprocessor=None`` to train on texts with its tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np

import choros.keras as hvd

VOCABULARY, LENGTH, RANK = 32, 16, 4


def main() -> None:
    args = parse_arguments()
    hvd.init()
    hvd.pin_device()
    keras.utils.set_random_seed(hvd.rank())

    # One rank writes files; the others wait until they are there.
    preset = hvd.broadcast_object(args.preset or make_preset(args.save_dir / "preset") if hvd.rank() == 0 else None)
    model = keras_hub.models.CausalLM.from_preset(preset, preprocessor=None)
    model.backbone.enable_lora(RANK)

    # Only the gradients of variables that are trained are sent.
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    trained, frozen = (
        sum(map(keras.ops.size, each)) for each in (model.trainable_weights, model.non_trainable_weights)
    )
    if hvd.rank() == 0:
        print(
            f"{hvd.size()} rank(s) on {keras.backend.backend()} train {int(trained)} of {int(trained + frozen)} weights"
        )

    train, test = (counting(number, seed) for seed, number in enumerate((args.limit or 1024, 128)))
    history = model.fit(
        hvd.shard(train, batch_size=args.batch_size * hvd.size(), shuffle=True),
        validation_data=hvd.shard(test, batch_size=args.batch_size * hvd.size()),
        epochs=args.epochs,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        shuffle=False,
        verbose=2 if hvd.rank() == 0 else 0,
    )

    if hvd.rank() == 0:
        file = args.save_dir / "lora.lora.h5"
        model.backbone.save_lora_weights(str(file))
        report(args, history.history, {"trained": int(trained), "frozen": int(frozen), "model": str(file)})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tunes a language model with LoRA.")
    add = parser.add_argument
    add("--epochs", type=int, default=6, help="passes over the data (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="texts per step and rank (default: %(default)s)")
    add("--limit", type=int, help="train on this many texts")
    add("--preset", help="a preset of KerasHub (default: a tiny GPT-2 that is made here)")
    add("--save-dir", type=Path, default=Path("runs/kerashub_lora"), help="where files go (default: %(default)s)")
    add("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def make_preset(directory: Path) -> str:
    """Saves a tiny GPT-2, as it is initialised."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        dropout=0.0,
        max_sequence_length=LENGTH,
    )
    keras_hub.models.GPT2CausalLM(backbone, preprocessor=None).save_to_preset(str(directory))
    return str(directory)


def counting(number: int, seed: int) -> tuple[dict[str, Any], Any, Any]:
    """Returns texts, the next token at each position, and the weight of each: the first two tell the step."""
    generator = np.random.default_rng(seed)
    first, step = generator.integers(0, VOCABULARY, (number, 1)), generator.integers(1, 4, (number, 1))
    tokens = ((first + step * np.arange(LENGTH + 1)) % VOCABULARY).astype("int32")
    mask = np.ones((number, LENGTH), "int32")
    weights = np.broadcast_to(np.arange(LENGTH) > 0, (number, LENGTH)).astype("float32")
    return {"token_ids": tokens[:, :-1], "padding_mask": mask}, tokens[:, 1:], weights


def report(args: argparse.Namespace, history: dict[str, list[float]], figures: dict[str, Any]) -> None:
    figures |= {
        "example": "kerashub_lora",
        "framework": keras.backend.backend(),
        "ranks": hvd.size(),
        "epochs": args.epochs,
        "loss": float(history["loss"][-1]),
        "held_out_loss": float(history["val_loss"][-1]),
        "accuracy": float(history["val_accuracy"][-1]),
        "history": [{"epoch": epoch, "loss": float(loss)} for epoch, loss in enumerate(history["loss"], 1)],
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    print("held-out accuracy {accuracy:.4f}; LoRA's weights saved as {model}".format(**figures))


if __name__ == "__main__":
    main()
