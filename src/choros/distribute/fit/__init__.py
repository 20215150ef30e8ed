"""Training of Keras models that were created in a strategy's scope."""
