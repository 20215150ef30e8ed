"""How the processes of a ParameterServer job speak to each other: authenticated connections that carry objects."""

from choros.transport.channel import Channel, ChannelClosed, connect
from choros.transport.listener import Door
from choros.transport.remote_errors import Failure
from choros.transport.secret import job_key

__all__ = ["Channel", "ChannelClosed", "Door", "Failure", "connect", "job_key"]
