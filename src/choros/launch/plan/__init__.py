"""Arguments become a job, a job becomes a command. Pure."""
