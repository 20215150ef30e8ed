"""Processes, signals, ports and directories of one host, for the driver and the wrappers."""
