"""Hides matplotlib from the processes that tests start: Keras imports it wherever it is installed, in a second."""

raise ImportError("hidden by tests/hidden")
