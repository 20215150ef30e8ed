"""Global batches, of whatever kind of data set, cut to a process's part of each; a module a kind."""

from choros.parallel.data.part import Part, are_arrays, check_global_batch, checked, count_rows, cut

__all__ = ["Part", "are_arrays", "check_global_batch", "checked", "count_rows", "cut"]
