"""Gradients of all ranks, reduced: one reducer, whatever the framework, and how arrays get from rank to rank."""
