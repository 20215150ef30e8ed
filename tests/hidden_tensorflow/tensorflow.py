"""Hides TensorFlow from jobs of other frameworks: Keras imports it to write down a layer, in seconds."""

raise ImportError("hidden by tests/hidden_tensorflow")
