"""Processes, signals and directories of one host: what the driver and the wrappers both need of the system."""
