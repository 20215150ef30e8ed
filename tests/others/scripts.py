"""The scripts, and the frameworks for which each is written."""

from __future__ import annotations

__all__ = ["ROADS", "SCRIPTS"]

#: Besides plain Keras; ``roads.py`` draws them.
ROADS = ("horovod", "strategy")
ALL = "tensorflow torch jax"
SCRIPTS = {
    "gan": "jax",
    "wgan_gp": "jax",
    "vae": ALL,
    "captcha": ALL,
    "siamese": ALL,
    "masked_language": ALL,
    "simclr": "torch jax",
    "distillation": ALL,
    "stateful_rnn": "tensorflow jax",  # on PyTorch Keras itself fails: it assigns states before the backward pass
    "citations": ALL,
    "actor_critic": ALL,
    "lora": ALL,
}
