"""Replicas on the devices of one process, on JAX; and device names, on all frameworks."""
