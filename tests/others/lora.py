"""Fine-tuning with low-rank adapters (LoRA): few of many weights are trained, with AdamW and a schedule."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from others.roads import Road
from others.trained import JIT, Trained, weights_of

VOCABULARY, LENGTH, WIDTH, CLASSES = 23, 6, 8, 3


def pretrained() -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    attended = layers.MultiHeadAttention(2, WIDTH // 2, name="attention")(x, x)
    x = layers.LayerNormalization(name="normalization")(layers.Add()([x, attended]))
    x = layers.Dense(WIDTH, activation="gelu", name="feedforward")(x)
    return keras.Model(tokens, layers.GlobalAveragePooling1D()(x))


def train(road: Road) -> Trained:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (37, LENGTH)).astype("int32")
    labels = generator.integers(0, CLASSES, 37).astype("int32")
    with road.scope():
        backbone = pretrained()
        backbone.trainable = False
        for name in ("embedding", "feedforward"):
            layer = backbone.get_layer(name)
            layer.trainable = True
            layer.enable_lora(rank=2)
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), backbone, layers.Dense(CLASSES)])
        schedule = keras.optimizers.schedules.CosineDecay(0.05, 12, warmup_target=0.1, warmup_steps=2)
        optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        model.compile(
            road.optimizer(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            jit_compile=JIT,
        )
    history = road.fit(model, (tokens, labels), batch_size=12, epochs=3)
    assert len(model.trainable_variables) < len(model.variables) / 2
    return Trained(weights_of(model), history)
