"""The scripts, and the frameworks for which each is written."""

from __future__ import annotations

__all__ = ["ROADS", "SCRIPTS"]

#: Besides plain Keras; ``roads.py`` draws them.
ROADS = ("horovod", "strategy")
ALL = "tensorflow torch jax"
SCRIPTS = {
    "gan": ALL,
    "wgan_gp": ALL,
    "cyclegan": "tensorflow torch",  # a model has one optimizer on JAX
    "vae": ALL,
    "captcha": ALL,
    "siamese": ALL,
    "masked_language": ALL,
    "simclr": ALL,
    "distillation": ALL,
    "stateful_rnn": "tensorflow jax",  # on PyTorch Keras itself fails: it assigns states before the backward pass
    "citations": ALL,
    "actor_critic": ALL,
    "lora": ALL,
}
