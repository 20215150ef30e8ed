"""Events of a job: the layers emit them, listeners receive them."""

import signal

#: The variable with the file descriptor of the pipe through which a rank sends its events to its wrapper: those of the
#: kinds that chorosrun always needs, or with ``EVERY_EVENT`` after it all of them.
EVENTS_FD = "CHOROS_EVENTS_FD"
EVERY_EVENT = ",all"
#: The signal on which the ranks of a job commit and end, as it goes on on other hosts. Ranks without commits ignore it.
MOVE = signal.SIGWINCH
