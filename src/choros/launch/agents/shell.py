"""The program in place of ssh: ``python -m choros.launch.agents.shell PORT HOST COMMAND…`` has the agent of a host
run a command, shows what it writes, and ends with its exit code. The hub listens at ``PORT`` of this host.
"""

import os
import sys

from choros import durations
from choros.errors import ChorosError
from choros.launch.agents import HUB, LOST, CommandExit, ShellCommand
from choros.transport.channel import connect
from choros.transport.secret import job_key


def main() -> None:
    """Runs the command in ``sys.argv``."""
    port, host, *command = sys.argv[1:]
    address = f"127.0.0.1:{port}"
    try:
        hub = connect(address, job_key(os.environ, [address]), "shell", HUB, durations.AGENT_PROOF)
        hub.send(ShellCommand(host, " ".join(command)))
        while not isinstance(message := hub.receive(), CommandExit):
            os.write(message.descriptor, message.data)
    except ChorosError as error:
        sys.stderr.write(f"{host}: {error}\n")
        sys.exit(LOST)
    sys.exit(message.code)


if __name__ == "__main__":
    main()
