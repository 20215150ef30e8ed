"""What the program beside the first task sends: to the driver through a channel, to its task through a pipe."""

from dataclasses import dataclass, field

from choros.errors import ChorosError

#: The name with which the driver proves that it has the key.
DRIVER = "the Spark driver"
#: To the driver, the first message: all tasks run. It is answered with ``None`` when an earlier attempt of the stage
#: has ended, so that no two of them write commits.
STARTED = "started"
#: To the driver: all that ranks have printed has been sent. It is answered, too.
ALL_PRINTED = "all printed"
#: From the driver: another attempt of the stage has begun. The program ends its ranks, and then the connection.
SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Printed:
    """To the driver: what ranks have written to their standard output, or to their standard error."""

    error: bool
    text: str


@dataclass(frozen=True)
class Listening:
    """To the task: the hub listens at this port for the other machines; 0 if there are none."""

    port: int


@dataclass(frozen=True)
class Returned:
    """To the task: the ranks' results, pickled by the program, which has what unpickles them, or why there are none."""

    results: bytes = field(repr=False)
    failure: ChorosError | None = None
