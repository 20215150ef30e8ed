"""The hub: on the first host, it knows the agents of the others, and hands them what is to be run there."""

import os
import shlex
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, final

from choros import durations
from choros.durable import unfinished
from choros.errors import ConfigError, EngineError, HostUnreachable, LaunchError
from choros.launch.agents import (
    HOST_LEAVES,
    HUB,
    LOST,
    AgentReady,
    CommandExit,
    CommandOutput,
    HostSlots,
    RunCommand,
    ShellCommand,
    say,
)
from choros.launch.plan.arguments import Arguments
from choros.launch.plan.hosts import Host, total_slots
from choros.launch.processes.directories import SESSION, Directory, remove_owned, temporary
from choros.topology.clusters import ClusterHost
from choros.transport.channel import Channel, ChannelClosed, Listener, listen
from choros.transport.secret import job_key


def with_slots(cluster: ClusterHost, arguments: Arguments, count_accelerators: Callable[[], int]) -> ClusterHost:
    """Returns the cluster with how many ranks a host takes: as requested, one for each accelerator, or equal shares."""
    slots = arguments.nproc_per_node or cluster.slots or count_accelerators()
    if not slots and arguments.processes is not None and cluster.size is not None:
        slots = -(-arguments.processes // cluster.size)
    return replace(cluster, slots=slots or 1)


@final
class Hub:
    """Listens for agents and shells from when it is made to ``close``.

    Attributes:
        port: where it listens; another one than the cluster's if that is 0.
    """

    def __init__(self, cluster: ClusterHost) -> None:
        self._cluster = cluster
        self._own = Host(os.uname().nodename, cluster.slots or 1)
        self._changed = threading.Condition()
        #: By the number of its host; a host that is lost stays until another one has its number.
        self._hosts: dict[int, Host] = {}
        self._agents: dict[str, Channel] = {}
        self._shells: dict[int, tuple[str, Channel]] = {}
        self._commands = 0
        self._closed = False
        key = job_key(os.environ, [f"{self._own.name}:{cluster.port or 1}"])
        try:
            listening = listen("", cluster.port)
        except OSError as error:
            raise LaunchError(
                f"chorosrun cannot listen at port {cluster.port}, where the other hosts of {cluster.name} look for it "
                f"({error}): another job may run here. MASTER_PORT, on all hosts, names another one."
            ) from error
        self.port = int(listening.getsockname()[1])
        path = temporary() / f"{SESSION}hub-{os.urandom(6).hex()}"
        directory = Directory.acquire(path)  # if this process is killed, the next job removes it
        if directory is None:
            raise LaunchError(f"{path} cannot be made: set TMPDIR to a directory that can be written.")
        self._directory, self._script, self._listed = directory, path / "hosts.sh", path / "hosts"
        self._write()
        self._script.write_text(f"#!/bin/sh\nexec cat {shlex.quote(str(self._listed))}\n")
        self._script.chmod(stat.S_IRWXU)
        python = (sys.executable, "-P", "-m", "choros.launch.agents.shell")
        self._shell = shlex.join([*python, str(self.port)])  # mpirun takes what follows a colon for another one
        self._listener = Listener(listening, key, HUB, self._serve)  # last: agents write the list, too

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts that have come, in the order of their numbers."""
        return (self._own, *(self._hosts[index] for index in sorted(self._hosts)))

    @property
    def _present(self) -> tuple[Host, ...]:
        return tuple(host for host in self.hosts if host is self._own or host.name in self._agents)

    def gather(self, arguments: Arguments, seconds: float) -> Arguments:
        """Waits for the cluster's hosts, or for slots for all ranks; after ``seconds`` those of an elastic job's fewest
        suffice, else HostUnreachable. Returns ``arguments`` of a job on the hosts that are there, and in an elastic job
        on those that come.
        """
        if arguments.processes is None and self._cluster.size is None:
            raise ConfigError(f"{self._cluster.name} does not say how many hosts there are: give -np, or -H.")
        deadline, shown = time.monotonic() + seconds, time.monotonic() + durations.SLOW_CHECK
        with self._changed:
            while lacking := self._lacking(arguments.processes):
                now = time.monotonic()
                if now >= deadline:
                    break
                if now >= shown:
                    say(f"waiting for {lacking} of {self._cluster.name}, for up to {deadline - now:.0f} s …")
                    shown = now + durations.AGENTS_SHOWN
                self._changed.wait(min(deadline, shown) - now)
            there = self._present
        found, least = total_slots(there), arguments.min_num_proc
        if lacking and (least is None or found < least):
            refused = (
                f" The last connection that was refused: {self._listener.refusal}" if self._listener.refusal else ""
            )
            raise HostUnreachable(
                f"{lacking} of {self._cluster.name} did not come within {seconds:.0f} s; there are "
                f"{', '.join(map(str, there))}. Each host "
                f"must run this command, and reach port {self.port} of {self._own.name}.{refused}"
            )
        if (least, arguments.max_num_proc) == (None, None):
            return replace(arguments, ssh_command=self._shell, hosts=",".join(map(str, there)))
        asked, most = arguments.num_proc, arguments.max_num_proc
        if asked is not None:  # fewer may suffice
            asked, most = min(asked, found), most or asked
        script = str(self._script)
        return replace(
            arguments, ssh_command=self._shell, host_discovery_script=script, num_proc=asked, max_num_proc=most
        )

    def _lacking(self, slots: int | None) -> str:
        if self._cluster.size is not None:
            count = self._cluster.size - len(self._present)
            return f"{count} of {self._cluster.size} hosts" if count > 0 else ""
        found = total_slots(self._present)
        return "" if slots is None or found >= slots else f"hosts for {slots - found} of {slots} ranks"

    def close(self, code: int) -> None:
        """Ends the agents with the exit code of the job."""
        self._listener.close()
        with self._changed:
            self._closed = True
            agents, self._agents = self._agents, {}
        for agent in agents.values():
            with suppress(ChannelClosed):
                agent.send(code)
        remove_owned(self._directory.path)
        self._directory.unlock()

    def _write(self) -> None:
        if self._closed:
            return
        with unfinished(self._listed) as path:
            path.write_text("".join(f"{host}\n" for host in self.hosts))

    def _serve(self, channel: Channel, first: Any) -> None:
        if isinstance(first, AgentReady):
            self._serve_agent(channel, first)
        elif isinstance(first, ShellCommand):
            self._serve_shell(channel, first)
        elif isinstance(first, HostSlots):
            with self._changed:
                self._own = replace(self._own, slots=first.slots.get(0, self._own.slots))
                for index, host in self._hosts.items():
                    self._hosts[index] = replace(host, slots=first.slots.get(index, host.slots))
                self._write()
            with suppress(ChannelClosed):
                channel.send(None)

    def _serve_agent(self, channel: Channel, ready: AgentReady) -> None:
        address = channel.peer_address
        host = Host(ready.name if ":" in address else address, ready.slots)  # mpirun would cut an IPv6 address
        with self._changed:
            # One that has started anew may have another number.
            self._hosts = {index: each for index, each in self._hosts.items() if each.name != host.name}
            self._hosts[ready.index] = host
            self._agents[host.name] = channel
            self._write()
            self._changed.notify_all()
        with suppress(EngineError):
            while True:
                message = channel.receive()
                if isinstance(message, CommandOutput | CommandExit):
                    self._answer(message)
                elif message == HOST_LEAVES:
                    self._forget(ready.index, host)
        with self._changed:
            if self._agents.get(host.name) is channel:
                del self._agents[host.name]
            lost = [number for number, (name, _) in self._shells.items() if name == host.name]
        for number in lost:
            self._answer(CommandExit(number, LOST))

    def _forget(self, index: int, host: Host) -> None:
        with self._changed:
            if index in self._hosts and self._hosts[index].name == host.name:
                del self._hosts[index]
                self._write()

    def _answer(self, message: CommandOutput | CommandExit) -> None:
        with self._changed:
            _, shell = self._shells.get(message.number, ("", None))
        if shell is not None:
            with suppress(ChannelClosed):
                shell.send(message)

    def _serve_shell(self, channel: Channel, command: ShellCommand) -> None:
        with self._changed:
            agent = self._agents.get(command.host)
            self._commands += 1
            number = self._commands
            self._shells[number] = command.host, channel
        try:
            if agent is None:
                text = f"no agent of {command.host} is connected to chorosrun\n"
                channel.send(CommandOutput(number, 2, text.encode()))
                channel.send(CommandExit(number, LOST))
                return
            agent.send(RunCommand(number, command.text))
            channel.receive()  # it sends nothing: it has gone
        except ChannelClosed:
            if agent is not None:
                with suppress(ChannelClosed):
                    agent.send(RunCommand(number, None))
        finally:
            with self._changed:
                del self._shells[number]
