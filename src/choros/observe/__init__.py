"""Events of a job: the layers emit them, listeners receive them."""

__all__ = ["EVENTS_FD"]

#: The variable with the file descriptor of the pipe through which a rank sends its events to its wrapper.
EVENTS_FD = "CHOROS_EVENTS_FD"
