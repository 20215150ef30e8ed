"""How the processes of a ParameterServer job speak to each other: authenticated connections that carry objects."""

from choros.distribute.transport.channel import Channel, ChannelClosed, connect
from choros.distribute.transport.door import Door
from choros.distribute.transport.failure import Failure
from choros.distribute.transport.secret import job_key

__all__ = ["Channel", "ChannelClosed", "Door", "Failure", "connect", "job_key"]
