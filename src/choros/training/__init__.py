"""Keras' machinery that both programming models share: distributed optimizers, training steps, metrics, variables."""
