"""Descriptions of jobs for the schedulers of clusters, filled in: ``choros deploy``."""
