"""The wrapper: the process beside each rank, between mpirun and the user's command."""
