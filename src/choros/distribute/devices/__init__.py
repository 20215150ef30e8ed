"""Replicas that are devices of one process: on JAX, and how devices are named on all frameworks."""
