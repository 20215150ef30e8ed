"""Gradient reduction over the ranks: one reducer for all frameworks, and the exchanges that sum arrays."""
