"""What chorosrun's own process does: start mpirun, watch the ranks, print, stop."""
