"""Allreduce algorithms for ranks that are processes, one per file, chosen by message size and the ranks' hosts."""
