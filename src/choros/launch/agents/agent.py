"""The agent of a host that is not the first one: runs what chorosrun there asks for, and ends when the job ends."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, final

import psutil

from choros import durations
from choros.errors import HostUnreachable, PeerLostError
from choros.launch.agents import (
    HOST_LEAVES,
    HUB,
    LOST,
    AgentReady,
    CommandExit,
    CommandOutput,
    RunCommand,
    say,
)
from choros.launch.plan.environment import without_launchers
from choros.launch.processes.process_tree import (
    CHILD_SUBREAPER,
    end_children,
    reap_children,
    set_option,
    signal_group,
)
from choros.topology import Master
from choros.topology.clusters import ClusterHost
from choros.transport.channel import Channel, ChannelClosed, Unreachable, connect
from choros.transport.secret import job_key

#: What ends this host: the ranks on it leave in order, if the job is elastic.
_LEAVES = (signal.SIGTERM, signal.SIGUSR1)
#: The most bytes of a message.
_AT_ONCE = 1 << 16
_WRAPPER = "launch/wrapper/__main__.py"


def serve_host(cluster: ClusterHost, seconds: float) -> int:
    """Runs the ranks of this host for the chorosrun on the first one, which must come within ``seconds``; returns the
    job's exit code. ``PeerLostError``: that chorosrun has gone.
    """
    address = str(Master(cluster.first, cluster.port))
    hub = _connected(cluster, address, seconds)
    set_option(CHILD_SUBREAPER, 1)  # mpirun's daemon leaves its parent
    commands = _Commands(hub, without_launchers(os.environ))
    for number in _LEAVES:
        signal.signal(number, lambda *_: commands.leave())
    try:
        hub.send(AgentReady(cluster.index, cluster.slots or 1, _own_name()))
        say(f"this host runs ranks for chorosrun on {cluster.first}, which shows what they print.")
        while isinstance(message := hub.receive(), RunCommand):
            commands.obey(message)
    except ChannelClosed as error:
        if commands.has_left:
            return 128 + signal.SIGTERM
        raise PeerLostError(
            f"chorosrun on {cluster.first} has ended without a word: {error} The ranks here are ended; with "
            "--commit-dir, the same command goes on from the last commit."
        ) from error
    finally:
        end_children()
    code: int = message
    return code


def _own_name() -> str:
    full = socket.getfqdn()
    return os.uname().nodename if full.startswith("localhost") else full


def _connected(cluster: ClusterHost, address: str, seconds: float) -> Channel:
    key = job_key(os.environ, [address])
    deadline, said = time.monotonic() + seconds, False
    while True:
        part = min(durations.AGENTS_SHOWN if said else durations.SLOW_CHECK, max(0.0, deadline - time.monotonic()))
        try:
            return connect(address, key, f"host {cluster.index}", HUB, part, durations.AGENT_LOOK)
        except Unreachable as error:
            if time.monotonic() + durations.AGENT_LOOK >= deadline:
                raise HostUnreachable(
                    f"this is host {cluster.index} of {cluster.name}, and chorosrun on the first one could not be "
                    f"reached at {address} within {seconds:.0f} s: it must run the same command, and accept "
                    f"connections at this port ({error.__cause__})."
                ) from error
            said = True
            say(f"waiting for chorosrun on {address}, the first host of {cluster.name} …")


@final
class _Commands:
    """The commands that run on this host."""

    def __init__(self, hub: Channel, environ: Mapping[str, str]) -> None:
        self._hub = hub
        self._environ = environ
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self.has_left = False

    def obey(self, command: RunCommand) -> None:
        """Begins a command, or stops it."""
        if command.text is not None:
            threading.Thread(target=self._run, args=(command.number, command.text), daemon=True).start()
        elif (process := self._running.get(command.number)) is not None:
            signal_group(process.pid, signal.SIGKILL)

    def leave(self) -> None:
        """Says to the hub that this host goes, and asks its ranks to end; then the connection is closed."""
        threading.Thread(target=self._leave, daemon=True).start()  # not in a signal's handler: the hub may be slow

    def _leave(self) -> None:
        with suppress(ChannelClosed):
            self._hub.send(HOST_LEAVES)
        own = psutil.Process()
        for process in own.children(recursive=True):
            with suppress(psutil.Error):
                if any(each.endswith(_WRAPPER) for each in process.cmdline()):
                    process.terminate()
        while own.children():  # mpirun's daemon ends when the job goes on without this host
            time.sleep(durations.LEFT_LOOK)
            reap_children()
        self.has_left = True
        self._hub.close()

    def _run(self, number: int, text: str) -> None:
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", text],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:  # such as too many processes
            with suppress(ChannelClosed):
                self._hub.send(CommandOutput(number, 2, f"/bin/sh cannot be started: {error}\n".encode()))
                self._hub.send(CommandExit(number, LOST))
            return
        self._running[number] = process
        pipes = [(1, process.stdout), (2, process.stderr)]
        readers = [threading.Thread(target=self._pass_on, args=(number, *pipe), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        code = process.wait()
        del self._running[number]
        with suppress(ChannelClosed):
            self._hub.send(CommandExit(number, code if code >= 0 else 128 - code))

    def _pass_on(self, number: int, descriptor: int, pipe: IO[bytes]) -> None:
        with pipe, suppress(ChannelClosed):
            while data := os.read(pipe.fileno(), _AT_ONCE):
                self._hub.send(CommandOutput(number, descriptor, data))
