"""What a job does, as events: one narrow interface that the layers emit into and that listeners read."""

__all__ = ["EVENTS_FD"]

#: The variable in which a wrapper gives its rank the descriptor of a pipe for events.
EVENTS_FD = "CHOROS_EVENTS_FD"
