"""chorosrun and choros.run: turn arguments into a job and a job into a command; start, supervise and stop it."""
