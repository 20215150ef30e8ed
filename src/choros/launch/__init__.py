"""chorosrun and choros.run: arguments become a job, a job becomes a command; start, watch, stop."""

__all__: list[str] = []
